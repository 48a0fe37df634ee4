// Hardware counters over the time of the capture, and why those that are missing are.

import { keep } from "fornax/address.js";
import { chart } from "fornax/chart.js";
import { h, replace } from "fornax/dom.js";
import { number, seconds, si } from "fornax/format.js";
import { table } from "fornax/table.js";
import { data } from "profile/model.js";
import { choice } from "profile/parts.js";

// The section, and what is to be called when it goes: [element, end]. `asked` is the name of a counter.
export function counters(asked) {
  const { series, absent } = data.counters;
  const section = h("section", {}, h("h2", {}, "Hardware counters"));
  const reasons = Map.groupBy(Object.entries(absent), ([, why]) => why);
  const missing = [...reasons].map(([why, pairs]) =>
    h("p", { class: "lead" }, `Absent: ${pairs.map(([name]) => name).join(", ")}. Why: ${why}.`),
  );
  if (series.length === 0) {
    section.append(...(missing.length ? missing : [h("p", { class: "lead" }, "Absent: the capture holds none.")]));
    return [section, () => {}];
  }
  const byName = Map.groupBy(series, (each) => each.name);
  const names = [...byName.keys()];
  const body = h("div");
  let made = null;
  const show = (name) => {
    made?.destroy();
    made = over(byName.get(name), name);
    replace(body, made.element);
  };
  const first = byName.has(asked) ? asked : names[0];
  section.append(
    ...missing,
    h(
      "div",
      { class: "bar" },
      choice(
        "Counter",
        names.map((name) => [name, name]),
        first,
        (name) => {
          keep({ counter: name });
          show(name);
        },
      ),
    ),
    body,
    sums(series),
  );
  show(first);
  return [section, () => made?.destroy()];
}

// Of a total, the count a second since the sample before; else the samples themselves.
function points({ time, value, total }) {
  if (!total) return time.map((at, index) => [at, value[index]]);
  return time.slice(1).map((at, index) => {
    const span = (at - time[index]) / 1e9;
    return [at, span > 0 ? (value[index + 1] - value[index]) / span : null];
  });
}

function over(list, name) {
  const lines = list.map((each) => ({ label: labelOf(each), points: points(each) }));
  const x = [...new Set(lines.flatMap((each) => each.points.map(([at]) => at)))].sort((a, b) => a - b);
  const place = new Map(x.map((at, index) => [at, index]));
  const series = lines.map((each) => {
    const y = x.map(() => null);
    for (const [at, value] of each.points) y[place.get(at)] = value;
    return { label: each.label, y, spanGaps: true, points: each.points.length < 60 };
  });
  return chart({
    label: `${name} over the capture`,
    data: { x: x.map((at) => at / 1e9), series },
    xLabel: "time",
    xFormat: (value) => seconds(value),
    yFormat: (value) => si(value, list[0].total ? "/s" : ""),
    fromZero: true,
  });
}

function labelOf({ rank, device }) {
  return data.info.ranks.length > 1 ? `rank ${rank} ${device}` : device;
}

function sums(series) {
  const rows = series.map((each) => {
    const span = (each.time.at(-1) - each.time[0]) / 1e9;
    const whole = each.value.at(-1) - each.value[0];
    const sum = each.value.reduce((total, value) => total + value, 0);
    return {
      name: each.name,
      of: labelOf(each),
      total: each.total ? whole : null,
      rate: each.total && span > 0 ? whole / span : null,
      mean: each.total ? null : sum / each.value.length,
      most: each.total ? null : each.value.reduce((most, value) => Math.max(most, value), -Infinity),
      samples: each.value.length,
    };
  });
  const figure = (key, label, show) => ({ key, label, value: (row) => row[key], show: (row, value) => show(value) });
  return table({
    caption: "Hardware counters",
    columns: [
      { key: "name", label: "Counter", value: (row) => row.name, text: true, wide: true },
      { key: "of", label: "Of", value: (row) => row.of, text: true },
      figure("total", "Total", (value) => si(value)),
      figure("rate", "A second", (value) => si(value)),
      figure("mean", "Mean of samples", (value) => number(value)),
      figure("most", "Most", (value) => number(value)),
      figure("samples", "Samples", number),
    ],
    rows,
    key: (row) => `${row.of} ${row.name}`,
    filterLabel: rows.length > 12 ? "Filter counters (regular expression)" : null,
  }).element;
}
