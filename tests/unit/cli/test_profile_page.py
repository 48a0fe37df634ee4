"""Pages of `fornax profile`."""

from pathlib import Path

import pytest

from fornax.cli.main import main
from fornax.profile import capture


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps of a product."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("block"):
            return jnp.tanh(x @ x)

    x = step(jnp.ones((256, 256)))
    directory = tmp_path_factory.mktemp("prof")
    with capture(directory):
        for number in range(8):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                x = step(x).block_until_ready()
    return directory


def test_show_and_compare_write_a_page(captured: Path, tmp_path: Path) -> None:
    shown, compared = tmp_path / "shown.html", tmp_path / "compared.html"
    assert main(["profile", "show", str(captured), "--html", str(shown)]) == 0
    assert '"compared":null' in shown.read_text()
    words = ["profile", "compare", str(captured), str(captured), "--html", str(compared)]
    assert main(words) == 0
    assert '"failed":false' in compared.read_text()


def test_a_page_that_cannot_be_written_is_a_mistake_of_the_user(
    captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "show", str(captured), "--html", str(captured)]) == 2
    assert "cannot write the page" in capsys.readouterr().err
