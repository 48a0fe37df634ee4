// Where a run's time went: a strip of causes over time, its faults and restarts, and the sums.

import { keep } from "fornax/address.js";
import { h, replace, s } from "fornax/dom.js";
import { moment, percent, seconds } from "fornax/format.js";
import { shareCell, table } from "fornax/table.js";
import { rangeOf } from "dashboard/address.js";
import { grid, nothing, section } from "dashboard/parts.js";
import { get, partOf } from "dashboard/source.js";

/** By cause: what it is called, and its colour. Steps stand first, at the bottom of a column. */
const CAUSES = {
  step: ["steps that were kept", "#2f9e74"],
  wait_for_data: ["waiting for data", "#93cdb1"],
  compile: ["compile", "#7c5cd6"],
  evaluate: ["evaluation", "#26a0ad"],
  checkpoint: ["checkpoint", "#c98a1b"],
  snapshot: ["copy to memory", "#ecc94b"],
  restore: ["restore", "#2f7fc9"],
  exchange: ["exchange of slices", "#b06fc7"],
  profile: ["capture of a profile", "#d96c9f"],
  spikes: ["loss spikes", "#a63d0a"],
  lost: ["steps done again", "#f0a48d"],
  detection: ["detection", "#dc3a26"],
  recovery: ["recovery", "#7d8899"],
  waiting: ["waiting for hosts", "#57606f"],
  initialise: ["start", "#b3bdcb"],
  other: ["end", "#d3dae3"],
  down: ["nothing ran", "transparent"],
};
const ORDER = Object.keys(CAUSES);
const WIDTH = 1000, HEIGHT = 72, TOP = 24, LANE = 18, COLUMNS = 500;

/** The tab. Its address: `from` and `to`, seconds after the start. */
export async function goodputView(root, { id, values, signal, follow }) {
  let account = await get(partOf(id, "goodput"), signal);
  let range = rangeOf(values), dragging = false;
  const zoom = (to) => {
    range = to;
    keep({ from: to?.[0], to: to?.[1] });
    draw();
  };
  const draw = () => replace(root, parts(account, range, zoom, (on) => { dragging = on; }));
  draw();
  follow(["goodput.jsonl", "events.jsonl", "cluster"], async () => {
    account = await get(partOf(id, "goodput"), signal);
    if (!dragging) draw();
  });
}

function parts(account, range, zoom, dragging) {
  if (!account.spans.length) return nothing("No time is recorded yet.");
  const begin = account.spans[0].begin, whole = account.spans.at(-1).end - begin;
  const after = (each) => ({ begin: each.begin - begin, end: each.end - begin, cause: each.cause ?? "down", waited: each.waited ?? 0 });
  const spans = account.spans.map(after);
  const lanes = [["", spans], ...Object.entries(account.ranks ?? {}).filter(([, list]) => list.length).map(([rank, list]) => [`rank ${rank}`, list.map(after)])];
  const faults = account.faults.map((each, i) => ({ ...each, number: i + 1, at: each.began - begin }));
  const starts = spans.filter((each, i) => i > 0 && each.cause === "initialise" && spans[i - 1].cause !== "initialise").map((each) => each.begin);
  const shown = [Math.max(0, range?.[0] ?? 0), Math.min(whole, range?.[1] ?? whole)];
  const view = { lanes, faults, starts, whole, shown: shown[0] < shown[1] ? shown : [0, whole], zoom, dragging };
  const many = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;
  return [
    section("Time line",
      h("p", { class: "lead" }, `${percent(account.goodput)} of ${seconds(account.wall_seconds)} went into the ${many(account.steps, "step")} that were kept; `
        + `${many(account.attempts, "start")}, ${many(faults.length, "fault")}.`),
      buttons(view), strip(view), legend(spans)),
    causes(account),
    faults.length ? faultTable(faults) : null,
    account.spikes?.length ? spikeTable(account.spikes) : null,
    longest(spans),
  ];
}

function buttons({ shown: [from, to], whole, zoom }) {
  const by = (factor, shift) => () => {
    const middle = (from + to) / 2 + shift * (to - from), half = ((to - from) * factor) / 2;
    const low = Math.max(0, middle - half), high = Math.min(whole, middle + half);
    zoom((low === 0 && high === whole) || low >= high ? null : [low, high]);
  };
  const one = (text, label, listener) => h("button", { type: "button", "aria-label": label, title: label, on: { click: listener } }, h("span", { "aria-hidden": "true" }, text));
  return h("div", { class: "bar" }, one("+", "zoom in", by(0.5, 0)), one("−", "zoom out", by(2, 0)), one("◀", "earlier", by(1, -0.5)),
    one("▶", "later", by(1, 0.5)), h("button", { type: "button", on: { click: () => zoom(null) } }, "whole run"),
    h("span", { class: "soft" }, `${seconds(from)} to ${seconds(to)} after the start`));
}

/** Seconds by cause in each of `COLUMNS` equal columns between two times. */
function columns(spans, from, to) {
  const width = (to - from) / COLUMNS;
  const found = Array.from({ length: COLUMNS }, () => ({}));
  for (const { begin, end, cause, waited } of spans) {
    if (end <= from || begin >= to) continue;
    const first = Math.max(0, Math.floor((begin - from) / width));
    const last = Math.min(COLUMNS - 1, Math.floor((end - from) / width));
    for (let i = first; i <= last; i++) {
      const seconds = Math.min(end, from + (i + 1) * width) - Math.max(begin, from + i * width);
      if (seconds <= 0) continue;
      found[i][cause] = (found[i][cause] ?? 0) + seconds * (1 - waited);
      if (waited) found[i].wait_for_data = (found[i].wait_for_data ?? 0) + seconds * waited;
    }
  }
  return found.map((each) => ORDER.filter((cause) => each[cause]).map((cause) => [cause, each[cause] / width]));
}

/** Equal columns next to each other as one rectangle a cause. */
function rectangles(drawn, top, height) {
  const key = (column) => column.map(([cause, share]) => cause + share.toFixed(2)).join();
  const found = [];
  for (let i = 0; i < COLUMNS;) {
    let same = i + 1;
    while (same < COLUMNS && key(drawn[same]) === key(drawn[i])) same++;
    let bottom = top + height;
    for (const [cause, share] of drawn[i]) {
      const tall = Math.min(1, share) * height;
      bottom -= tall;
      found.push(s("rect", { x: (i * WIDTH) / COLUMNS, y: bottom, width: ((same - i) * WIDTH) / COLUMNS + 0.2, height: tall, fill: CAUSES[cause]?.[1] ?? "#888" }));
    }
    i = same;
  }
  return found;
}

function strip({ lanes, faults, starts, shown: [from, to], zoom, dragging }) {
  const scale = (at) => ((at - from) / (to - from)) * WIDTH;
  const inside = (at) => at >= from && at <= to;
  const drawn = columns(lanes[0][1], from, to);
  const others = lanes.slice(1, 33);
  const bottom = TOP + HEIGHT + others.length * LANE;
  const lane = (top, height) => s("rect", { class: "lane", x: 0, y: top, width: WIDTH, height });
  const marks = [
    ...starts.filter(inside).map((at) => s("path", { class: "restart", d: `M${scale(at)} ${TOP}V${bottom}` }, s("title", {}, "processes started again"))),
    ...faults.filter((each) => inside(each.at)).map((each) => s("path", { class: "fault", d: `M${scale(each.at)} ${TOP - 4}V${bottom}` }, s("title", {}, `fault ${each.number}: ${each.kind}`))),
  ];
  const brush = s("rect", { class: "brush", y: TOP, height: bottom - TOP, width: 0 });
  const picture = s("svg", { viewBox: `0 0 ${WIDTH} ${bottom}`, preserveAspectRatio: "none", role: "img", style: { height: `${bottom}px` },
    "aria-label": "causes of the run's time from its start to its end; the tables below have the sums" },
  lane(TOP, HEIGHT), rectangles(drawn, TOP, HEIGHT),
  others.map(([, spans], i) => [lane(TOP + HEIGHT + i * LANE + 3, LANE - 4), rectangles(columns(spans, from, to), TOP + HEIGHT + i * LANE + 3, LANE - 4)]), marks, brush);
  const numbers = faults.filter((each) => inside(each.at)).map((each) =>
    h("span", { class: "fault-number", style: { left: `${scale(each.at) / 10}%` } }, each.number));
  const readout = h("p", { class: "readout soft" }, "Drag to zoom, double click for the whole.");
  drag(picture, brush, (x) => {
    const column = drawn[Math.min(COLUMNS - 1, Math.max(0, Math.floor(x * COLUMNS)))];
    readout.textContent = `${seconds(from + x * (to - from))}: ${column.map(([cause, share]) => `${CAUSES[cause]?.[0] ?? cause} ${percent(share)}`).join(", ") || "nothing"}`;
  }, (a, b) => zoom([from + a * (to - from), from + b * (to - from)]), () => zoom(null), dragging);
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => h("span", {}, seconds(from + share * (to - from))));
  return h("div", { class: "strip" }, picture, numbers,
    others.length ? h("p", { class: "soft" }, `Below the first rank: ${others.map(([name]) => name).join(", ")}${lanes.length - 1 > others.length ? ` and ${lanes.length - 1 - others.length} more` : ""}.`) : null,
    h("div", { class: "ticks soft", "aria-hidden": "true" }, ticks), readout);
}

/** A range chosen with the pointer, as shares of the picture's width. */
function drag(picture, brush, hover, chosen, reset, dragging) {
  let start = null;
  const at = (event) => {
    const box = picture.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  picture.addEventListener("pointerdown", (event) => {
    start = at(event);
    dragging(true);
    picture.setPointerCapture(event.pointerId);
  });
  picture.addEventListener("pointermove", (event) => {
    const x = at(event);
    hover(x);
    if (start === null) return;
    brush.setAttribute("x", Math.min(start, x) * WIDTH);
    brush.setAttribute("width", Math.abs(x - start) * WIDTH);
  });
  picture.addEventListener("pointerup", (event) => {
    const from = start, to = at(event);
    start = null;
    dragging(false);
    brush.setAttribute("width", 0);
    if (from !== null && Math.abs(to - from) > 0.005) chosen(Math.min(from, to), Math.max(from, to));
  });
  picture.addEventListener("pointercancel", () => {
    start = null;
    dragging(false);
  });
  picture.addEventListener("dblclick", reset);
}

function named(cause) {
  return [h("i", { class: "key" + (cause === "down" ? " empty" : ""), style: { background: CAUSES[cause]?.[1] ?? "#888" } }), CAUSES[cause]?.[0] ?? cause];
}

function legend(spans) {
  const least = spans.at(-1).end / (2 * COLUMNS);
  const there = new Set(spans.filter((each) => each.end - each.begin > least || each.cause !== "down").flatMap((each) => (each.waited ? [each.cause, "wait_for_data"] : [each.cause])));
  return h("ul", { class: "legend" }, ORDER.filter((cause) => there.has(cause)).map((cause) => h("li", {}, named(cause))));
}

function causes(account) {
  const whole = account.wall_seconds || 1;
  const rows = Object.entries(account.seconds).filter(([, time]) => time > 0);
  if (account.down_seconds > 0) rows.push(["down", account.down_seconds]);
  return section("By cause", table({
    caption: "time by cause", rows, key: ([cause]) => cause, filterLabel: null, sort: { key: "time", descending: true },
    columns: [
      { key: "cause", label: "cause", value: ([cause]) => CAUSES[cause]?.[0] ?? cause, text: true, show: ([cause]) => h("span", {}, named(cause)) },
      { key: "time", label: "time", value: ([, time]) => time, show: (row, time) => seconds(time) },
      { key: "share", label: "share", value: ([cause, time]) => (cause === "down" ? null : time / whole), show: (row, share) => (share === null ? "not counted" : shareCell(share, percent(share))) },
    ],
  }).element);
}

function faultTable(faults) {
  const between = (a, b) => (typeof a === "number" && typeof b === "number" ? b - a : null);
  const time = (row, value) => (value === null ? "never" : seconds(value));
  return section("Faults", grid("faults", [
    { key: "number", label: "fault", value: (each) => each.number },
    { key: "kind", label: "kind", value: (each) => each.kind + (each.drill ? ` (drill: ${each.drill})` : ""), text: true },
    { key: "rank", label: "rank", value: (each) => (each.rank === null ? "controller" : String(each.rank)), text: true },
    { key: "when", label: "when", value: (each) => each.began, show: (each) => moment(each.began), text: true },
    { key: "verdict", label: "until the verdict", value: (each) => between(each.began, each.named), show: time },
    { key: "again", label: "until training again", value: (each) => between(each.named, each.formed), show: time },
  ], faults));
}

function spikeTable(spikes) {
  return section("Loss spikes that the run went back from", grid("loss spikes", [
    { key: "step", label: "step", value: (each) => each.step },
    { key: "to", label: "back to step", value: (each) => each.rewind_to ?? null },
    { key: "batches", label: "batches left out", value: (each) => (each.batches ?? []).join(", "), text: true },
    { key: "when", label: "when", value: (each) => each.time, show: (each) => moment(each.time), text: true },
  ], spikes));
}

function longest(spans) {
  const rows = spans.filter((each) => each.cause !== "step").sort((a, b) => b.end - b.begin - (a.end - a.begin)).slice(0, 12);
  return rows.length ? section("Longest times without a step", grid("longest times without a step", [
    { key: "from", label: "from", value: (each) => each.begin, show: (each) => seconds(each.begin) },
    { key: "cause", label: "cause", value: (each) => each.cause, text: true, show: (each) => h("span", {}, named(each.cause)) },
    { key: "time", label: "time", value: (each) => each.end - each.begin, show: (row, time) => seconds(time) },
  ], rows)) : null;
}
