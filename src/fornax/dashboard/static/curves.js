// Curves of one run or of several: a chart a metric, with one setting of axes, smoothing and zoom for all.

import { keep } from "fornax/address.js";
import { chart } from "fornax/chart.js";
import { h, replace } from "fornax/dom.js";
import { count, number, seconds, si } from "fornax/format.js";
import { numberOf, oneOf, pattern, rangeOf } from "dashboard/address.js";
import { calm, check, choice, nothing, searchField } from "dashboard/parts.js";
import { aligned, banded, ordered, overSeeds, positive, smoothed } from "dashboard/curve_data.js";
import { get, partOf, series } from "dashboard/source.js";

const AXES = { step: ["step", count], tokens: ["tokens", si], time: ["time since the start", seconds] };
const SELDOM = new Set(["step", "time", "tokens", "completions", "attempt"]);
const SKETCHES = 8; // runs of which all names are asked for; of more only those of the last line

/** Curves of `runs` in `root`. Returns {lines(run, records), reload(run?), offsets} for live updates.
 *
 * The address holds `x`, `logx`, `logy`, `smooth` (percent of the width), `seeds`, `names`, `from`, `to`. */
export async function curves(root, runs, { values, signal, end }) {
  const state = {
    x: oneOf(values.x, Object.keys(AXES)), logX: values.logx === "1", logY: values.logy === "1", seeds: values.seeds === "1",
    smooth: Math.min(100, Math.max(0, numberOf(values.smooth, 0))), names: values.names ?? "", range: rangeOf(values),
  };
  let names = ordered(new Set(runs.flatMap((run) => Object.keys(run.metrics)))).filter((name) => !SELDOM.has(name));
  const many = runs.length > SKETCHES;
  const panels = new Map();
  const grid = h("div", { class: "curves" + (many ? " many" : "") });
  const bar = h("div", { class: "bar" });
  const hint = h("p", { class: "soft zoomed" });
  replace(root, bar, hint, grid);

  const change = (key, address) => (value) => {
    state[key] = value;
    keep({ [address]: value === true ? "1" : value === false ? null : value });
    if (key === "x") zoom(null);
    for (const panel of panels.values()) panel.changed(key === "x");
  };

  function controls() {
    const slider = h("input", { type: "range", min: "0", max: "100", value: state.smooth, "aria-label": "Smoothing, percent of the width" });
    slider.addEventListener("input", calm(() => change("smooth", "smooth")(Number(slider.value)), 60));
    const seeds = overSeeds(runs).some((group) => group.length > 1);
    replace(bar,
      searchField("metrics: regular expression", state.names, pattern(state.names).wrong, (text) => {
        state.names = text;
        keep({ names: text });
        layout();
        return pattern(text).wrong;
      }),
      choice("x", state.x, Object.entries(AXES).map(([key, [label]]) => [key, label]), change("x", "x")),
      check("log x", state.logX, change("logX", "logx")), check("log y", state.logY, change("logY", "logy")),
      h("label", { class: "field" }, h("span", {}, "smooth"), slider),
      seeds ? check("band over seeds", state.seeds, change("seeds", "seeds")) : null);
  }

  function zoom(range) {
    state.range = range;
    keep({ from: range?.[0], to: range?.[1] });
    replace(hint, range ? [`${AXES[state.x][1](range[0])} to ${AXES[state.x][1](range[1])} `, h("button", { type: "button", on: { click: () => zoom(null) } }, "whole range")]
      : "Drag in a chart to zoom all of them; double click for the whole.");
    for (const panel of panels.values()) panel.zoom();
  }

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) panels.get(entry.target.dataset.name)?.draw();
  }, { rootMargin: "300px" });

  function layout() {
    const found = pattern(state.names);
    const shown = names.filter((name) => found.test(name));
    for (const [name, panel] of panels) if (!shown.includes(name)) { seen.unobserve(panel.element); panel.destroy(); panels.delete(name); }
    for (const name of shown) {
      if (!panels.has(name)) panels.set(name, panelOf(name, { runs, state, zoom, signal, many, offsets }));
      grid.append(panels.get(name).element);
      seen.observe(panels.get(name).element);
    }
    grid.querySelector(".lead")?.remove();
    if (!shown.length) grid.append(nothing(names.length ? "No metric has such a name." : "No metrics are logged yet."));
  }

  const offsets = new Map();
  controls();
  layout();
  zoom(state.range);
  end(() => { seen.disconnect(); for (const panel of panels.values()) panel.destroy(); });
  if (!many) {
    const more = await Promise.all(runs.map((run) => get(partOf(run.id, "names"), signal).catch(() => ({ names: [] }))));
    const all = new Set([...names, ...more.flatMap((each) => each.names.map((one) => one.name))]);
    if (all.size > names.length) {
      names = ordered(all).filter((name) => !SELDOM.has(name));
      layout();
    }
  }
  return {
    offsets,
    lines(run, records) {
      const added = records.flatMap((record) => Object.keys(record)).filter((name) => !names.includes(name) && !SELDOM.has(name));
      if (added.length) {
        names = ordered(new Set([...names, ...added]));
        layout();
      }
      for (const panel of panels.values()) panel.lines(run, records);
    },
    reload() { for (const panel of panels.values()) panel.changed(true); },
  };
}

/** One chart with the points that it draws. */
function panelOf(name, { runs, state, zoom, signal, many, offsets }) {
  const note = h("span", { class: "soft" });
  const host = h("div");
  const element = h("figure", { class: "panel", "data-name": name }, h("figcaption", {}, h("b", {}, name), " ", note), host);
  let points = null, drawn = null, asked = false, added = 0;

  async function load() {
    asked = true;
    const count = Math.max(60, Math.min(1500, Math.round(40000 / runs.length)));
    const { x, range } = state;
    try {
      const found = await series(runs.map((run) => run.id), name, { x, points: count, range }, signal);
      if (x !== state.x || String(range) !== String(state.range)) return;
      points = new Map(found.filter((each) => each.x.length).map((each) => [each.run, each]));
      for (const each of found) if (each.offset !== undefined) offsets.set(each.run, Math.min(each.offset, offsets.get(each.run) ?? Infinity));
      added = 0;
      make();
      if (found.some((each) => each.complete === false)) setTimeout(load, 1500);
    } catch (error) {
      if (!signal.aborted) note.textContent = error.message;
    }
  }

  function data() {
    let { x, curves } = aligned(runs.filter((run) => points.has(run.id)).map((run) => ({ ...points.get(run.id), label: run.id, run })), state.logX);
    const places = new Map(runs.map((run, i) => [run.id, i]));
    if (state.seeds) {
      const by = new Map(curves.map((each) => [each.run.id, each]));
      const groups = overSeeds(runs).map((group) => group.map((run) => by.get(run.id)).filter(Boolean)).filter((group) => group.length);
      curves = groups.map((group) => (group.length > 1 ? banded(`${group[0].label} and ${group.length - 1} other ${group.length === 2 ? "seed" : "seeds"}`, group) : group[0]));
    }
    if (state.logY) curves = curves.map(positive);
    const width = x.length ? (x.at(-1) - x[0]) * 0.1 * (state.smooth / 100) ** 2 : 0;
    const lines = curves.flatMap((each) => {
      const place = places.get(each.run.id);
      const look = { label: each.label, colour: `series-${(place % 8) + 1}`, dashed: Math.floor(place / 8) % 2 === 1, points: x.length < 3 };
      const raw = { ...look, y: each.y, min: each.min, max: each.max };
      return width ? [{ ...raw, faint: true, dashed: false }, { ...look, y: smoothed(x, each.y, width) }] : [raw];
    });
    return { x, series: lines };
  }

  function make() {
    drawn?.destroy();
    drawn = null;
    const made = data();
    said();
    if (!made.series.some((each) => each.y.some((value) => value !== null))) {
      replace(host, nothing(state.logY ? "Nothing here is above zero: a log axis cannot show it." : "No points here."));
      return;
    }
    const [xLabel, xFormat] = AXES[state.x];
    drawn = chart({ label: spoken(), height: 240, data: made, xLabel, xFormat, xLog: state.logX, yLog: state.logY, sync: "curves",
      range: state.range, zoomed: zoom });
    replace(host, drawn.element);
  }

  function said() {
    const gaps = [...points.values()].reduce((sum, each) => sum + each.y.filter((value) => value === null).length, 0);
    const only = points.size === 1 ? [...points.values()][0] : null;
    replace(note, only ? `${number(only.y.findLast((value) => value !== null))} at ${AXES[state.x][1](only.x.at(-1))} ` : "",
      gaps ? h("span", { class: "bad" }, `${count(gaps)} not finite`) : "");
  }

  function spoken() {
    const parts = [...points.values()].slice(0, 5).map((each) => `${each.run}: last ${number(each.y.findLast((value) => value !== null))} at ${AXES[state.x][1](each.x.at(-1))}`);
    return `${name} by ${state.x}. ${parts.join("; ")}${points.size > 5 ? `; ${points.size - 5} more` : ""}`;
  }

  const redraw = calm(() => {
    if (!points) return;
    if (!drawn) make();
    else drawn.set(data());
    said();
  }, 150);
  const sharper = calm(load, 250);

  return {
    element,
    draw: () => asked || load(),
    changed: (again) => { if (asked) (again ? load() : points && make()); },
    zoom: () => { drawn?.zoom(state.range); if (asked && points) sharper(); },
    lines(run, records) {
      if (!points || state.range || !records.some((record) => name in record)) return;
      if (state.x === "time") return sharper(); // only the server knows when the run's first line was written
      const held = points.get(run) ?? { run, name, x: [], y: [], min: null, max: null };
      for (const record of records) {
        if (!(name in record)) continue;
        const x = state.x === "tokens" ? (record.tokens ?? record.completions) : record.step;
        if (!Number.isFinite(x) || (held.x.length && x <= held.x.at(-1))) continue;
        const value = Number.isFinite(record[name]) ? record[name] : null;
        held.x.push(x);
        held.y.push(value);
        held.min?.push(value);
        held.max?.push(value);
        added++;
      }
      if (held.x.length) points.set(run, held);
      if (added > 2000) { added = 0; sharper(); } else redraw();
    },
    destroy: () => { redraw.stop(); sharper.stop(); drawn?.destroy(); element.remove(); },
  };
}
