// Draws the time line on a canvas: overview, ruler, steps, lanes. What is narrower than a pixel is merged into one whose strength is its share of busy time.

import { count, seconds } from "fornax/format.js";
import { colour } from "fornax/theme.js";
import { above } from "profile/lanes.js";
import { CLASSES, data, operations } from "profile/model.js";

export const [OVERVIEW, RULER, STEPS, LANE, GAP] = [30, 22, 20, 18, 8];
export const HEAD = OVERVIEW + RULER;
const FONT = "11px system-ui, sans-serif";

// Width of the column of names.
export function gutter(width) {
  return width < 640 ? 92 : 190;
}

let palette = null;

// Read the theme's colours again.
export function repaint() {
  palette = null;
}

function colours() {
  if (palette) return palette;
  const named = (name) => colour(name);
  palette = Object.fromEntries(
    ["ink", "soft", "line", "paper", "tint", "accent", "on-series"].map((name) => [name, named(name)]),
  );
  palette.classes = Object.fromEntries(Object.entries(CLASSES).map(([name, value]) => [name, named(value)]));
  palette.series = [1, 2, 3, 4, 5, 6, 7, 8].map((number) => named(`series-${number}`));
  return palette;
}

// Colour of an event: by the class of its operation, else one of its name's own.
function tint(track, event) {
  const operation = track.events.operation[event];
  if (operation >= 0) return palette.classes[operations[operation].category] ?? palette.series[7];
  return palette.series[track.events.name[event] % 8];
}

// A layout of tracks below the head: {height, places: [{track, top, lanes, steps}]}, where `steps` is the rank whose steps are drawn above.
export function layout(all) {
  const places = [];
  let top = HEAD;
  let rank = null;
  all.forEach((track) => {
    const first = track.rank !== rank;
    rank = track.rank;
    if (first) top += STEPS + GAP;
    const lanes = track.folded ? 1 : track.lanes.length;
    places.push({ track, top, lanes, steps: first ? rank : null });
    top += lanes * LANE + GAP;
  });
  return { height: top + 4, places };
}

function niceStep(span, marks) {
  const rough = span / marks;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
}

// Draw all. `view` is {from, to} in nanoseconds, `state` {all, places, extent, top, chosen, marked, searching}.
export function paint(context, width, height, view, state) {
  const c = colours();
  const left = gutter(width);
  const scale = (width - left) / (view.to - view.from);
  const x = (time) => left + (time - view.from) * scale;
  context.font = FONT;
  context.textBaseline = "middle";
  context.fillStyle = c.paper;
  context.fillRect(0, 0, width, height);
  ruler(context, width, height, view, x, c, left, state.extent[0]);
  context.save();
  context.beginPath();
  context.rect(0, HEAD, width, height - HEAD);
  context.clip();
  for (const place of state.places) {
    const top = place.top - state.top;
    if (place.steps !== null) steps(context, place.steps, top - STEPS - GAP / 2, view, x, width, height, c, left);
    if (top > height || top + place.lanes * LANE < HEAD) continue;
    for (let depth = 0; depth < place.lanes; depth++)
      lane(context, place.track, depth, top + depth * LANE, view, scale, x, width, c, state);
  }
  if (state.marked) {
    context.fillStyle = c.accent;
    context.globalAlpha = 0.15;
    context.fillRect(x(state.marked.from), HEAD, x(state.marked.to) - x(state.marked.from), height);
    context.globalAlpha = 1;
  }
  names(context, state, height, c, left);
  context.restore();
  overview(context, width, view, state, c, left);
}

function ruler(context, width, height, view, x, c, left, zero) {
  const step = niceStep(view.to - view.from, Math.max(2, (width - left) / 110));
  context.textAlign = "left";
  for (let time = zero + Math.ceil((view.from - zero) / step) * step; time < view.to; time += step) {
    context.fillStyle = c.line;
    context.fillRect(x(time), OVERVIEW, 1, height);
    context.fillStyle = c.soft;
    const digits = Math.max(3, Math.ceil(Math.log10(Math.abs(time - zero) / step + 1)) + 1);
    context.fillText(seconds((time - zero) / 1e9, digits), x(time) + 4, OVERVIEW + RULER / 2);
  }
}

function steps(context, rank, top, view, x, width, height, c, left) {
  context.textAlign = "left";
  let shaded = false;
  for (const step of data.steps) {
    if (step.rank !== rank) continue;
    shaded = !shaded;
    if (step.end < view.from || step.begin > view.to) continue;
    const [from, to] = [Math.max(left, x(step.begin)), Math.min(width, x(step.end))];
    context.fillStyle = shaded ? c.line : c.tint;
    context.fillRect(from, top, Math.max(1, to - from), STEPS - 2);
    context.fillStyle = c.soft;
    if (x(step.begin) >= left) context.fillRect(x(step.begin), top, 1, STEPS - 2);
    const text = `${step.name} ${count(step.number)}  ${seconds((step.end - step.begin) / 1e9)}`;
    if (to - from > 30) clipped(context, text, from + 5, top + STEPS / 2 - 1, to - from - 8, c.ink);
  }
}

function clipped(context, text, x, y, room, fill) {
  const most = Math.floor(room / 6);
  if (most < 3) return;
  context.fillStyle = fill;
  context.fillText(text.length > most ? `${text.slice(0, most - 1)}…` : text, x, y, room);
}

function lane(context, track, depth, top, view, scale, x, width, c, state) {
  const { begin, end, busy, index, hits } = track.lanes[depth];
  const height = LANE - 2;
  const pixel = 1 / scale;
  let at = above(end, view.from);
  context.textAlign = "left";
  while (at < begin.length && begin[at] < view.to) {
    const from = Math.max(x(begin[at]), gutter(width));
    const to = Math.min(x(end[at]), width);
    const event = index[at];
    if (to - from >= 1.5) {
      const hit = !hits || hits[at + 1] > hits[at];
      context.globalAlpha = hit ? 1 : 0.16;
      context.fillStyle = tint(track, event);
      context.fillRect(from, top, to - from > 3 ? to - from - 0.75 : to - from, height);
      if (to - from > 34 && hit)
        clipped(
          context,
          data.names[track.events.name[event]],
          from + 4,
          top + height / 2 + 0.5,
          to - from - 7,
          c["on-series"],
        );
      at += 1;
    } else {
      const next = Math.max(at + 1, above(begin, begin[at] + pixel, at));
      const full = Math.min(1, (busy[next] - busy[at]) / pixel);
      const hit = !hits || hits[next] > hits[at];
      context.globalAlpha = hit ? 0.35 + 0.65 * full : 0.1;
      context.fillStyle = hits && hit ? c.accent : tint(track, event);
      context.fillRect(from, top, 1, height);
      at = next;
    }
  }
  context.globalAlpha = 1;
  const { chosen } = state;
  if (chosen && state.all[chosen.track] === track && chosen.lane === depth) {
    context.strokeStyle = c.ink;
    context.lineWidth = 2;
    const from = Math.max(gutter(width), x(begin[chosen.at]));
    context.strokeRect(from - 1, top - 1, Math.max(2, Math.min(width, x(end[chosen.at])) - from) + 2, height + 2);
  }
}

function names(context, state, height, c, left) {
  context.fillStyle = c.paper;
  context.fillRect(0, HEAD, left - 1, height);
  context.fillStyle = c.line;
  context.fillRect(left - 1, HEAD, 1, height);
  for (const { track, top, lanes, steps: rank } of state.places) {
    const y = top - state.top;
    if (rank !== null)
      clipped(
        context,
        data.info.ranks.length > 1 ? `steps of rank ${rank}` : "steps",
        6,
        y - STEPS / 2 - GAP / 2,
        left - 10,
        c.soft,
      );
    if (y > height || y + lanes * LANE < HEAD) continue;
    const mark = track.lanes.length > 1 ? (track.folded ? "▸ " : "▾ ") : "";
    clipped(context, mark + track.label, 6, y + LANE / 2, left - 10, c.ink);
  }
}

function overview(context, width, view, state, c, left) {
  const [low, high] = state.extent;
  const at = (time) => left + ((time - low) / (high - low)) * (width - left);
  context.fillStyle = c.tint;
  context.fillRect(0, 0, width, OVERVIEW - 4);
  context.fillStyle = c.series[0];
  const bins = state.density;
  const each = (width - left) / bins.length;
  bins.forEach((value, index) =>
    context.fillRect(left + index * each, OVERVIEW - 5 - value * (OVERVIEW - 9), each, value * (OVERVIEW - 9)),
  );
  context.fillStyle = c.accent;
  context.globalAlpha = 0.22;
  context.fillRect(at(view.from), 0, Math.max(2, at(view.to) - at(view.from)), OVERVIEW - 4);
  context.globalAlpha = 1;
  context.strokeStyle = c.accent;
  context.lineWidth = 1;
  context.strokeRect(at(view.from) + 0.5, 0.5, Math.max(2, at(view.to) - at(view.from) - 1), OVERVIEW - 5);
  context.fillStyle = c.soft;
  context.textAlign = "left";
  context.fillText("all", 6, OVERVIEW / 2 - 2);
}

// Share of device rows that is busy in each of `bins` parts of the whole, 0 to 1, for the strip above.
export function density(all, [low, high], bins = 400) {
  const device = all.filter(({ row }) => row.kind === "operations");
  const out = new Float64Array(bins);
  const size = (high - low) / bins;
  for (const { lanes } of device.length ? device : all) {
    if (!lanes[0]) continue;
    const { begin, end } = lanes[0];
    for (let index = 0; index < begin.length; index++) {
      const last = Math.min(bins - 1, Math.floor((end[index] - low) / size));
      for (let bin = Math.max(0, Math.floor((begin[index] - low) / size)); bin <= last; bin++) {
        out[bin] += Math.max(
          0,
          Math.min(end[index], low + (bin + 1) * size) - Math.max(begin[index], low + bin * size),
        );
      }
    }
  }
  const top = Math.max(...out) || 1;
  return out.map((value) => value / top);
}
