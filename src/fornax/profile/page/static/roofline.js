// Operations by arithmetic intensity and rate reached, under the ceilings of the device.

import { h, hideCard, pairs, replace, s, showCard } from "fornax/dom.js";
import { bytes, count, percent, seconds, si, times } from "fornax/format.js";
import { operationFacts } from "profile/operations.js";
import { ceilings, CLASSES, operations } from "profile/model.js";
import { decades, legend, nothing, operationLinks, sized } from "profile/parts.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [78, 16, 18, 46];

export function roofline(panel) {
  const ran = operations.filter((each) => each.seconds > 0 && each.category !== "exchange" && each.bytes > 0);
  const roof = ceilings();
  if (ran.length === 0) {
    panel.append(nothing("No operation in the capture has bytes or FLOPs that are known."));
    return null;
  }
  const unknown =
    roof.bandwidth === null && roof.peaks.size === 0
      ? " The rates of this device are not known, so no ceiling is drawn."
      : "";
  const drawn = [
    part(
      panel,
      "Roofline",
      `Products and kernels. Area is time. A point on the line is as fast as the device can be at its arithmetic intensity; below it, time is lost.${unknown}`,
      ran.filter((each) => each.flops > 0),
      (each) => ({ x: each.flops / each.bytes, y: (each.flops * each.count) / each.seconds }),
      {
        roof,
        xLabel: "arithmetic intensity, FLOP/byte",
        yLabel: "FLOP/s reached",
        xText: (value) => `${value.toPrecision(3)} FLOP/byte`,
        yText: (value) => si(value, "FLOP/s"),
      },
    ),
    part(
      panel,
      "Bandwidth",
      "Operations without products: elementwise work, reductions, copies. Area is time; the line is the memory's bandwidth.",
      ran.filter((each) => !(each.flops > 0)),
      (each) => ({ x: each.bytes, y: (each.bytes * each.count) / each.seconds }),
      {
        roof: { bandwidth: null, peaks: new Map(roof.bandwidth ? [["of the memory", roof.bandwidth]] : []) },
        unit: "B/s",
        xLabel: "bytes of a run",
        yLabel: "bytes/s reached",
        xText: bytes,
        yText: (value) => si(value, "B/s"),
      },
    ),
  ];
  return () => drawn.forEach((end) => end?.());
}

function part(panel, title, lead, members, place, axes) {
  if (members.length === 0) return null;
  const points = [...members].sort((a, b) => b.seconds - a.seconds).map((each) => ({ each, ...place(each) }));
  const share = points.reduce((sum, { each }) => sum + each.share, 0);
  const details = h("aside", { class: "details", "aria-live": "polite" });
  let at = -1;
  const choose = (to) => {
    at = Math.min(Math.max(to, 0), points.length - 1);
    mark();
    const { each } = points[at];
    replace(details, h("h2", { class: "mono" }, each.name), operationFacts(each), operationLinks(each, "roofline"));
  };
  const drawing = sized((width) => plot(points, axes, width, (point) => choose(points.indexOf(point))));
  const host = h(
    "div",
    {
      tabindex: "0",
      role: "application",
      "aria-label": `${title}: ${points.length} operations; arrow keys go through them, the longest first`,
    },
    drawing.element,
  );
  const mark = () =>
    host
      .querySelectorAll("circle.point")
      .forEach((each) => each.classList.toggle("chosen", Number(each.dataset.at) === at));
  host.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(at + step);
  });
  const shown = Object.entries(CLASSES).filter(([name]) => points.some(({ each }) => each.category === name));
  panel.append(
    h(
      "section",
      {},
      h("h2", {}, title),
      h("p", { class: "lead" }, `${lead} ${count(points.length)} operations, ${percent(share, 2)} of time.`),
      legend(Object.fromEntries(shown)),
      host,
      details,
    ),
  );
  return drawing.end;
}

function plot(points, axes, width, choose) {
  const { roof } = axes;
  const height = Math.max(280, Math.min(480, width * 0.5));
  const peak = Math.max(0, ...roof.peaks.values());
  const knee = roof.bandwidth && peak ? peak / roof.bandwidth : null;
  const span = (values, air) => [Math.min(...values) / air, Math.max(...values) * air];
  const [x0, x1] = span([...points.map(({ x }) => x), ...(knee ? [knee] : [])], 3);
  const [y0, y1] = span([...points.map(({ y }) => y), ...(peak ? [peak] : [])], 3);
  const scale = (low, high, from, to) => (value) =>
    from + ((Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (to - from);
  const x = scale(x0, x1, LEFT, width - RIGHT);
  const y = scale(y0, y1, height - BOTTOM, TOP);
  const inside = (list, low, high) => list.filter((value) => value >= low && value <= high);
  const middle = (TOP + height - BOTTOM) / 2;
  const grid = [
    inside(decades(x0, x1), x0, x1).map((value) => [
      s("line", { x1: x(value), x2: x(value), y1: TOP, y2: height - BOTTOM, style: { stroke: "var(--line)" } }),
      s("text", { x: x(value), y: height - BOTTOM + 17, "text-anchor": "middle", class: "axis" }, si(value)),
    ]),
    inside(decades(y0, y1), y0, y1).map((value) => [
      s("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), style: { stroke: "var(--line)" } }),
      s("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end", class: "axis" }, si(value)),
    ]),
    s("text", { x: (LEFT + width - RIGHT) / 2, y: height - 8, "text-anchor": "middle", class: "axis" }, axes.xLabel),
    s(
      "text",
      { x: 14, y: middle, "text-anchor": "middle", class: "axis", transform: `rotate(-90 14 ${middle})` },
      axes.yLabel,
    ),
  ];
  const whole = operations.reduce((sum, each) => sum + each.seconds, 0);
  const dots = points.map((point, at) => {
    const { each } = point;
    const made = s("circle", {
      class: "point",
      cx: x(point.x),
      cy: y(point.y),
      r: 3 + 32 * Math.sqrt(each.seconds / whole),
      data: { at },
      style: { fill: `var(--${CLASSES[each.category] ?? "series-8"})` },
    });
    made.addEventListener("pointermove", (event) =>
      showCard(
        event.clientX,
        event.clientY,
        h("b", {}, each.name),
        pairs([
          ["time", `${seconds(each.seconds)} (${percent(each.share)})`],
          ["reached", axes.yText(point.y)],
          [axes.xLabel.split(",")[0], axes.xText(point.x)],
          ["× bound", each.timesBound ? times(each.timesBound) : null],
          ["module", each.scope],
          ["source", each.source],
        ]),
      ),
    );
    made.addEventListener("pointerleave", hideCard);
    made.addEventListener("click", () => choose(point));
    return made;
  });
  const name = `plot-${axes.yLabel.length}`;
  const clip = s(
    "clipPath",
    { id: name },
    s("rect", { x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: height - TOP - BOTTOM }),
  );
  return s(
    "svg",
    { width, height, "aria-hidden": "true", class: "roofline" },
    clip,
    grid,
    s("g", { "clip-path": `url(#${name})` }, roofs(roof, x0, x1, x, y), dots),
    names(axes, x0, x1, y0, x, y),
  );
}

// The slope of the memory's bandwidth, and one level a dtype.
function roofs({ bandwidth, peaks }, x0, x1, x, y) {
  const out = [];
  const top = Math.max(0, ...peaks.values());
  if (bandwidth) {
    const end = top ? Math.min(x1, top / bandwidth) : x1;
    out.push(s("line", { class: "roof", x1: x(x0), y1: y(bandwidth * x0), x2: x(end), y2: y(bandwidth * end) }));
  }
  for (const peak of peaks.values()) {
    const from = bandwidth ? Math.max(x0, peak / bandwidth) : x0;
    if (from < x1) out.push(s("line", { class: "roof", x1: x(from), y1: y(peak), x2: x(x1), y2: y(peak) }));
  }
  return out;
}

function names({ roof: { bandwidth, peaks }, unit = "FLOP/s" }, x0, x1, y0, x, y) {
  const out = [...peaks].map(([dtype, peak]) =>
    s("text", { class: "roof-name", x: x(x1) - 4, y: y(peak) - 6, "text-anchor": "end" }, `${si(peak, unit)} ${dtype}`),
  );
  if (bandwidth) {
    const from = Math.max(x0, y0 / bandwidth) * 1.25;
    const slope = (Math.atan2(y(bandwidth * from * 10) - y(bandwidth * from), x(from * 10) - x(from)) * 180) / Math.PI;
    out.push(
      s(
        "text",
        {
          class: "roof-name",
          x: x(from),
          y: y(bandwidth * from) - 6,
          transform: `rotate(${slope} ${x(from)} ${y(bandwidth * from) - 6})`,
        },
        `${si(bandwidth, "B/s")}`,
      ),
    );
  }
  return out;
}
