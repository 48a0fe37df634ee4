// Runs compared: their curves, what their configs differ in, and their last values.

import { go, keep } from "fornax/address.js";
import { h, replace } from "fornax/dom.js";
import { number } from "fornax/format.js";
import { href, joined, list, pattern } from "dashboard/address.js";
import { curves } from "dashboard/curves.js";
import { check, grid, nothing, searchField, section, statusMark } from "dashboard/parts.js";
import { differing } from "dashboard/runs.js";
import { exported, follow, get, linkTo, settled } from "dashboard/source.js";

const MOST_EXPORTED = 20; // runs that the server puts whole into one file

/** The view. Its address: `runs`, and what `curves` and the two tables keep. */
export async function compareView(root, context) {
  const { values, signal, end, keys, connection } = context;
  const { runs: all } = await get("/api/runs", signal);
  const asked = list(values.runs);
  const runs = asked.map((id) => all.find((run) => run.id === id)).filter(Boolean);
  const missing = asked.filter((id) => !all.some((run) => run.id === id));
  const heading = [h("h1", {}, "Compare"), missing.length
    ? h("p", { class: "notice", role: "alert" }, `No such run here: ${missing.join(", ")}.`) : null];
  if (!runs.length) {
    replace(root, heading, nothing("Select runs in the list and compare them, or begin with the newest:"),
      h("p", { class: "bar" }, h("a", { class: "button", href: href("runs") }, "Choose runs"),
        all.length ? h("a", { class: "button", href: href("compare", { runs: joined(newest(all, 8)) }) }, `The newest ${Math.min(8, all.length)}`) : null));
    return;
  }
  const charts = h("div");
  const tuned = runs.filter((run) => run.kind === "tune").map((run) => run.id);
  replace(root, heading,
    h("ul", { class: "chips", "aria-label": "Runs that are compared" }, runs.map((run, place) => chip(run, place, runs))),
    h("div", { class: "bar" },
      tuned.length > 1 ? h("a", { class: "button", href: href("run", { id: tuned[0], tab: "samples", panes: joined(tuned.slice(0, 3)) }) }, "Samples side by side") : null,
      exported || runs.length > MOST_EXPORTED ? null : h("a", { class: "button", href: linkTo("/export", { run: runs.map((run) => run.id) }), download: "compare.html" }, "Export")),
    h("div", { class: "beside" }, charts, h("div", {}, runs.length > 1 ? configTable(runs, values) : null, lastValues(runs))));
  keys([{ key: "0", text: "zoom out", run: () => charts.querySelector(".zoomed button")?.click() }]);
  const drawn = await curves(charts, runs, context);
  const offsets = () => (runs.every((run) => drawn.offsets.has(run.id)) ? runs.map((run) => drawn.offsets.get(run.id)) : null);
  await settled(offsets, signal);
  end(follow(runs.map((run) => run.id), offsets(), {
    lines: ({ run, records }) => drawn.lines(run, records),
    reset: () => drawn.reload(),
    complete: () => drawn.reload(),
  }, connection));
}

function newest(runs, most) {
  return [...runs].sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0)).slice(0, most).map((run) => run.id);
}

function chip(run, place, runs) {
  const rest = runs.filter((each) => each !== run).map((each) => each.id);
  const key = h("i", { class: "key" + (Math.floor(place / 8) % 2 ? " dashed" : ""), style: { background: `var(--series-${(place % 8) + 1})` } });
  return h("li", {}, key, h("a", { href: href("run", { id: run.id }) }, run.id), " ", statusMark(run.status),
    h("button", { type: "button", class: "plain", "aria-label": `take ${run.id} out`, on: { click: () => go("compare", { runs: joined(rest) }) } }, "×"));
}

function configTable(runs, values) {
  const state = { all: values.allconfig === "1", filter: values.config ?? "" };
  const host = h("div");
  const draw = () => {
    const different = new Set(differing(runs));
    const found = pattern(state.filter);
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort().filter((key) => (state.all || different.has(key)) && found.test(key));
    const shown = runs.slice(0, 12);
    const columns = [{ key: "key", label: "key", value: (key) => key, text: true },
      ...shown.map((run) => ({ key: run.id, label: run.id, value: (key) => valueText(run.config[key]), text: true,
        show: (key, text) => h("span", { class: different.has(key) && text !== valueText(runs[0].config[key]) ? "differs" : "" }, text) }))];
    replace(host, keys.length ? grid("config of the runs", columns, keys) : nothing(state.filter ? "No key matches." : "Their configs are the same."),
      runs.length > shown.length ? nothing(`The first ${shown.length} of ${runs.length} runs; take some out for the others.`) : null);
  };
  draw();
  return section("Config", h("div", { class: "bar" },
    searchField("keys: regular expression", state.filter, pattern(state.filter).wrong, (text) => {
      state.filter = text;
      keep({ config: text });
      draw();
      return pattern(text).wrong;
    }),
    check("what is the same, too", state.all, (value) => { state.all = value; keep({ allconfig: value ? "1" : null }); draw(); })), host);
}

function valueText(value) {
  return value === undefined ? "—" : value === null ? "none" : String(value);
}

function lastValues(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  const shown = runs.slice(0, 12);
  return section("Last values", grid("last values of the runs", [
    { key: "name", label: "metric", value: (name) => name, text: true },
    ...shown.map((run) => ({ key: run.id, label: run.id, value: (name) => run.metrics[name] ?? null, show: (name, value) => (typeof value === "number" ? number(value) : String(value ?? "")) })),
  ], names));
}
