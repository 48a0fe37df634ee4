// Curves over uPlot: hover with values in the legend, zoom by drag, wheel and keyboard, log axes, stacked areas, bands.

import { h, replace } from "fornax/dom.js";
import { number } from "fornax/format.js";
import { colour, onTheme, seriesColour } from "fornax/theme.js";

const WHOLE = Array.from({ length: 40 }, (_, power) => [1, 2, 5][power % 3] * 10 ** Math.floor(power / 3));
const BINARY = Array.from({ length: 60 }, (_, power) => 2 ** power);

// A chart in an element that takes the width of its parent.
//   label: what it shows, for screen readers; height in pixels.
//   data: {x: [], series: [{label, y: [], colour, min, max, faint, dashed, hidden, points}]}: `colour` is a name of the theme, `min` and
//     `max` draw a band, `faint` a raw line behind a smoothed one, which has no entry in the legend; null is a gap.
//   xLabel, yLabel, xFormat, yFormat: texts of axes and legend; xLog, yLog: log axes; xTime: x is seconds since 1970.
//   stacked: areas on each other, the first at the bottom. sync: charts with one key share their cursor.
//   yBinary: ticks at powers of two, for bytes. range: [from, to] of x; zoomed(range or null): called when the reader zooms. hover(index or null): called as the cursor moves.
// Returns {element, set(data), zoom(range or null), destroy}; call `destroy` when the element is taken away.
export function chart(options) {
  const { label, height = 260, xFormat = number, yFormat = number, xLabel = "x", stacked = false } = options;
  const host = h("div", { class: "chart", tabindex: "0", role: "img", "aria-label": label });
  const legend = h("div", { class: "legend" });
  const element = h("div", {}, legend, host);
  const hidden = new Set(options.data.series.filter((each) => each.hidden).map((each) => each.label));
  let data = options.data;
  let range = options.range ?? null;
  let plot = null;
  let values = [];
  let quiet = false;

  const named = () => data.series.filter((each) => !each.faint);
  const visible = () => data.series.filter((each) => !hidden.has(each.label));
  const colourOf = (each) => (each.colour ? colour(each.colour) : seriesColour(named().findIndex((other) => other.label === each.label)));

  function makeLegend() {
    values = [h("b")];
    const entries = named().map((each) => {
      const value = h("b");
      values.push(value);
      const button = h("button", { type: "button", "aria-pressed": String(!hidden.has(each.label)), title: "Show or hide" },
        h("span", { class: "key", style: { background: colourOf(each) } }), each.label, value);
      button.addEventListener("click", () => {
        if (!hidden.delete(each.label)) hidden.add(each.label);
        build();
        legend.querySelectorAll("button")[named().indexOf(each)].focus();
      });
      return button;
    });
    replace(legend, entries, h("span", { class: "soft" }, xLabel, values[0]));
  }

  // Columns of uPlot and its description of them.
  function layers() {
    const columns = [data.x];
    const series = [{ label: xLabel }];
    const bands = [];
    const shown = visible();
    if (stacked) {
      let below = data.x.map(() => 0);
      const levels = shown.map((each) => (below = each.y.map((value, at) => below[at] + (value ?? 0))));
      for (let at = shown.length - 1; at >= 0; at--) {
        columns.push(levels[at]);
        const fill = colourOf(shown[at]);
        series.push({ label: shown[at].label, stroke: fill, width: 1, points: { show: false }, fill: faded(fill, 0.75) });
        if (at > 0) bands.push({ series: [series.length - 1, series.length], fill: faded(fill, 0.75) });
      }
      return { columns, series, bands };
    }
    for (const each of shown) {
      const stroke = colourOf(each);
      if (each.min && each.max) {
        columns.push(each.max, each.min);
        const edge = { stroke: "transparent", points: { show: false } };
        series.push(edge, edge);
        bands.push({ series: [series.length - 2, series.length - 1], fill: faded(stroke, 0.18) });
      }
      columns.push(each.y);
      series.push({ label: each.label, stroke: each.faint ? faded(stroke, 0.3) : stroke, width: each.faint ? 1 : 2, dash: each.dashed ? [6, 4] : [],
        points: { show: each.points ?? (each.y.length === 1 ? true : undefined), size: 6 }, spanGaps: each.spanGaps ?? false });
    }
    return { columns, series, bands };
  }

  function axis(side, text, format, incrs) {
    return { incrs, side, label: text, labelSize: 22, labelFont: "12px system-ui", font: "12px system-ui", stroke: colour("soft"), size: side === 3 ? 76 : 40,
      grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 },
      values: format && ((self, splits) => splits.map((each) => (each === null ? "" : format(each)))) };
  }

  function build() {
    plot?.destroy();
    plot = null;
    makeLegend();
    const { columns, series, bands } = layers();
    const width = host.clientWidth || element.parentElement?.clientWidth || 600;
    plot = new uPlot({
      width, height, series, bands,
      legend: { show: false },
      cursor: { sync: options.sync ? { key: options.sync } : undefined, drag: { x: true, y: false }, points: { show: !stacked } },
      scales: {
        x: { time: options.xTime ?? false, distr: options.xLog ? 3 : 1, range: (self, low, high) => limits(range ?? [low, high], options.xLog) },
        y: { distr: options.yLog ? 3 : 1, range: (self, low, high) => options.yLog ? airedLog(low, high) : aired(low, high, stacked || options.fromZero) },
      },
      axes: [axis(2, xLabel, options.xTime ? undefined : xFormat, !options.xTime && data.x.every(Number.isInteger) ? WHOLE : undefined), axis(3, options.yLabel, options.yLog ? (each) => (round(each) ? yFormat(each) : "") : yFormat, options.yBinary ? BINARY : undefined)],
      hooks: {
        setCursor: [(self) => said(self.cursor.idx)],
        setSelect: [(self) => {
          if (self.select.width < 3) return;
          const from = self.posToVal(self.select.left, "x");
          const to = self.posToVal(self.select.left + self.select.width, "x");
          self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          zoom([from, to]);
        }],
      },
    }, columns, host);
    plot.over.addEventListener("dblclick", () => zoom(null));
    plot.over.addEventListener("wheel", wheel, { passive: false });
  }

  function said(at) {
    const known = at !== null && at !== undefined;
    values[0].textContent = known ? (options.xTime ? new Date(data.x[at] * 1000).toLocaleString("sv-SE") : xFormat(data.x[at])) : "";
    named().forEach((each, index) => {
      values[index + 1].textContent = known && !hidden.has(each.label) ? yFormat(each.y[at]) : "";
    });
    if (!quiet) options.hover?.(known ? at : null);
  }

  function zoom(to, tell = true) {
    range = to;
    if (to) plot.setScale("x", { min: to[0], max: to[1] });
    else plot.setData(plot.data);
    if (tell) options.zoomed?.(to);
  }

  function wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // a page scrolls by wheel
    event.preventDefault();
    around(event.deltaY > 0 ? 1.25 : 0.8, plot.posToVal(event.offsetX, "x"));
  }

  function around(factor, middle) {
    const { min, max } = plot.scales.x;
    const [a, b, m] = options.xLog ? [Math.log(min), Math.log(max), Math.log(middle)] : [min, max, middle];
    const to = [m - (m - a) * factor, m + (b - m) * factor];
    zoom(options.xLog ? to.map(Math.exp) : to);
  }

  host.addEventListener("keydown", (event) => {
    if (!plot) return; // not laid out yet
    const { min, max } = plot.scales.x;
    const at = plot.cursor.idx ?? 0;
    const acts = {
      "+": () => around(0.7, (min + max) / 2),
      "=": () => around(0.7, (min + max) / 2),
      "-": () => around(1.4, (min + max) / 2),
      Escape: () => zoom(null),
      0: () => zoom(null),
      ArrowRight: () => cursor(Math.min(at + (event.shiftKey ? 10 : 1), data.x.length - 1)),
      ArrowLeft: () => cursor(Math.max(at - (event.shiftKey ? 10 : 1), 0)),
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  });

  function cursor(at) {
    plot.setCursor({ left: plot.valToPos(data.x[at], "x"), top: 10 });
  }

  const watch = new ResizeObserver(() => {
    if (plot && host.clientWidth && host.clientWidth !== plot.width) plot.setSize({ width: host.clientWidth, height });
    else if (!plot && host.clientWidth) build();
  });
  watch.observe(host);
  const endTheme = onTheme(() => plot && build());

  return {
    element,
    set(next) {
      const same = plot && next.series.map((each) => each.label).join("\n") === data.series.map((each) => each.label).join("\n");
      data = next;
      if (!plot) return;
      if (same) plot.setData(layers().columns, range === null);
      else build();
    },
    zoom(to) {
      quiet = true;
      if (plot) zoom(to, false);
      else range = to;
      quiet = false;
    },
    destroy() {
      watch.disconnect();
      endTheme();
      plot?.destroy();
    },
  };
}

function limits([low, high], log) {
  if (low === null || high === null || low === undefined) return log ? [1, 10] : [0, 1];
  if (low === high) return log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  return [low, high];
}

// Whether a number has one digit that is not zero: the ends of a log axis need no label otherwise.
function round(value) {
  return Math.abs(Number(value.toPrecision(1)) / value - 1) < 1e-9;
}

function airedLog(low, high) {
  if (low === null || high === null) return [1, 10];
  const air = low === high ? 2 : Math.max(1.02, (high / low) ** 0.06);
  return [low / air, high * air];
}

function aired(low, high, fromZero) {
  if (low === null || high === null) return [0, 1];
  if (fromZero) return [Math.min(0, low), high <= 0 ? 1 : high * 1.05];
  const air = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - air, high + air];
}

function faded(text, alpha) {
  const [red, green, blue] = text.match(/[\d.]+/g);
  return `rgb(${red} ${green} ${blue} / ${alpha})`;
}
