"""Run the code cells of a notebook in order, in one process: `run.py NOTEBOOK.ipynb ...`.

As Jupyter does, it shows the value of a cell's last expression; figures are drawn and not shown.
An error ends it with the cell's own lines in the traceback. It writes nothing into the notebook.
"""

import ast
import json
import linecache
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

os.environ.setdefault("MPLBACKEND", "agg")


def run(path: Path) -> None:
    """Run one notebook; what a cell raises is raised."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for number, text in enumerate(codes, start=1):
        name = f"{path.name}, cell {number}"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        body = ast.parse(text, name).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), name, "exec"), vars(module))
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), vars(module))
            if value is not None:
                print(repr(value))


if __name__ == "__main__":
    for word in sys.argv[1:]:
        if not Path(word).is_file():
            sys.exit(f"{word} is not a file; name a notebook, such as examples/notebooks/*.ipynb")
    try:
        for word in sys.argv[1:]:
            run(Path(word))
    except Exception:
        traceback.print_exc()  # with the lines of cells, which the interpreter's own would not find
        sys.exit(1)
