// Pictures of a run in a grid, by step and by name.

import { keep } from "fornax/address.js";
import { h, replace } from "fornax/dom.js";
import { bytes, number } from "fornax/format.js";
import { numberOf, pattern } from "dashboard/address.js";
import { choice, nothing, searchField } from "dashboard/parts.js";
import { get, linkTo, partOf } from "dashboard/source.js";

/** The tab. Its address: `step`, `search`, `wide` (pixels of a picture). */
export async function imagesView(root, { id, values, signal, keys, follow }) {
  const state = { step: numberOf(values.step), search: values.search ?? "", wide: Math.min(640, Math.max(96, numberOf(values.wide, 220))) };
  let answer = await get(partOf(id, "images"), signal);
  const bar = h("div", { class: "bar" }), grid = h("div", { class: "images" });
  replace(root, bar, grid);
  const steps = () => [...new Set(answer.images.map((each) => each.step).filter((step) => step !== null))].sort((a, b) => a - b);

  function controls() {
    const size = h("input", { type: "range", min: "96", max: "640", value: state.wide, "aria-label": "Width of a picture" });
    size.addEventListener("input", () => { state.wide = Number(size.value); keep({ wide: state.wide }); draw(); });
    replace(bar,
      choice("step", state.step === null ? "" : String(state.step), [["", "all"], ...steps().map((step) => [String(step), number(step)])], (value) => to(value === "" ? null : Number(value))),
      searchField("name: regular expression", state.search, pattern(state.search).wrong, (text) => { state.search = text; keep({ search: text }); draw(); return pattern(text).wrong; }),
      h("label", { class: "field" }, h("span", {}, "size"), size));
  }

  function to(step) {
    state.step = step;
    keep({ step });
    controls();
    draw();
  }

  function draw() {
    const found = pattern(state.search);
    const shown = answer.images.filter((each) => (state.step === null || each.step === state.step) && found.test(each.path));
    grid.style.setProperty("--wide", `${state.wide}px`);
    replace(grid, shown.length ? shown.map((each) => h("figure", {},
      h("img", { src: each.data ?? linkTo("/files", { run: id, path: each.path }), alt: each.path, loading: "lazy" }),
      h("figcaption", {}, each.step === null ? "" : `step ${number(each.step)} · `, each.path.split("/").at(-1), " ", h("span", { class: "soft" }, bytes(each.bytes)))))
      : nothing(answer.images.length ? "No picture matches." : "No pictures yet."),
    answer.total > answer.images.length ? nothing(`The first ${answer.images.length} of ${answer.total}.`) : null);
  }

  const walk = (by) => {
    const all = steps();
    const at = state.step === null ? (by > 0 ? -1 : all.length) : all.indexOf(state.step);
    if (all[at + by] !== undefined) to(all[at + by]);
  };
  keys([{ key: ["j", "ArrowRight"], text: "next step", run: () => walk(1) }, { key: ["k", "ArrowLeft"], text: "last step", run: () => walk(-1) }]);
  controls();
  draw();
  follow(["images"], async () => { answer = await get(partOf(id, "images"), signal); controls(); draw(); });
}
