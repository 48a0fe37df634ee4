"""The page of a profile in a real Chromium: how long until it is drawn, and how fluid it zooms.

    python benchmarks/profile_page.py [--write]

The time line is opened with 20,000, 200,000 and 1,000,000 events, in turns. A frame is what passes
between an event of the wheel and the end of the drawing that follows; a screen shows one every
16.7 ms. There is no peer: XProf's time line needs a server, Perfetto's page comes from the network.
"""

import argparse
import runpy
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

import _harness
from fornax.profile.page import write_page

PROFILES = Path(__file__).parents[1] / "tests" / "profiles.py"
EVENTS = (20_000, 200_000, 1_000_000)
ROUNDS = 5
_FRAMES = """async () => {
  const canvas = document.querySelector("canvas");
  const box = canvas.getBoundingClientRect();
  const frames = [];
  for (let at = 0; at < 60; at++) {
    const options = { deltaY: at < 30 ? -100 : 100, clientX: box.x + 700, clientY: box.y + 200 };
    const begin = performance.now();
    canvas.dispatchEvent(new WheelEvent("wheel", { ...options, cancelable: true }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
    frames.push(performance.now() - begin);
  }
  return frames;
}"""
_DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def pages(folder: Path) -> Iterator[tuple[int, Path, float]]:
    """Each page: its events, its file, and the processor seconds that writing it took."""
    made_profile = runpy.run_path(str(PROFILES))["made_profile"]
    for events in EVENTS:
        profile = made_profile(events=events)
        begin = time.process_time()
        path = write_page(profile, folder / f"{events}.html")
        yield events, path, time.process_time() - begin


def opened(browser: Any, path: Path) -> tuple[float, list[float]]:
    """Seconds until the time line is drawn, and milliseconds of each frame of a zoom."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    begin = time.perf_counter()
    page.goto(f"{path.as_uri()}#timeline")
    page.locator("canvas").wait_for()
    page.evaluate(_DRAWN)
    drawn = time.perf_counter() - begin
    frames = page.evaluate(_FRAMES)
    page.close()
    return drawn, frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        made = list(pages(Path(folder)))
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        turns = [[opened(browser, path) for _, path, _ in made] for _ in range(ROUNDS)]
        version = browser.version
        browser.close()
        rows = []
        for at, (events, path, seconds) in enumerate(made):
            drawn = statistics.median(turn[at][0] for turn in turns)
            frames = sorted(frame for turn in turns for frame in turn[at][1])
            middle, slow = frames[len(frames) // 2], frames[int(len(frames) * 0.99)]
            size = f"{path.stat().st_size / 1e6:.1f} MB"
            rows.append(
                (
                    f"{events:,}",
                    size,
                    f"{seconds:.2f} s",
                    f"{drawn:.2f} s",
                    f"{middle:.1f} ms",
                    f"{slow:.1f} ms",
                )
            )
    head = ("events", "file", "written in", "drawn after", "frame, median", "frame, 99th of 100")
    text = (
        "# The page of a profile\n\n"
        f"{_harness.machine()}; Chromium {version}, headless, without a GPU; medians of {ROUNDS}.\n"
        f"{_harness.versions('jax', 'numpy', 'playwright')}\n\n{_harness.table(head, rows)}\n"
    )
    print(text)
    if write:
        _harness.write_results("profile_page", text)


if __name__ == "__main__":
    main()
