// Operations, classes, modules or lines of source: measured time beside work and bounds.

import { keep } from "fornax/address.js";
import { h, pairs, replace, s } from "fornax/dom.js";
import { bytes, count, NONE, percent, seconds, si, source, times } from "fornax/format.js";
import { shareCell, table } from "fornax/table.js";
import { boundText, data, operations, programName } from "profile/model.js";
import { choice, NO_OPERATIONS, nothing, operationLinks } from "profile/parts.js";

const BY = [
  ["op", "operation"],
  ["class", "class"],
  ["module", "module of the model"],
  ["source", "line of source"],
];
const LABELS = { op: "Operation", class: "Class", module: "Module", source: "Source" };

const keyOf = (row) => `${row.program}\n${row.key}`;

export function operationsView(panel, values) {
  if (data.tables.op.rows.length === 0) {
    panel.append(nothing(NO_OPERATIONS));
    return;
  }
  const asked = operations[values.operation] ?? null;
  let by = asked || !LABELS[values.by] ? "op" : values.by;
  const details = h("aside", { class: "details", "aria-live": "polite" });
  const place = h("div");
  let made = null;

  function draw(filter, sort) {
    made = table({
      caption: `Time by ${LABELS[by].toLowerCase()}`,
      columns: columns(by),
      rows: data.tables[by].rows,
      key: keyOf,
      sort,
      filter,
      before: chooser,
      choose: (row) => {
        replace(details, detail(by, row));
        keep({ operation: by === "op" ? row.operations[0] : null });
      },
      changed: ({ sort: to, filter: text }) =>
        keep({ sort: to && `${to.descending ? "-" : ""}${to.key}`, filter: text }),
    });
    replace(place, made.element);
  }

  const chooser = choice("By", BY, by, (value) => {
    by = value;
    keep({ by, sort: null, filter: null, operation: null });
    replace(details);
    draw("", { key: "seconds", descending: true });
  });
  const sort = values.sort
    ? { key: values.sort.replace(/^-/, ""), descending: values.sort.startsWith("-") }
    : { key: "seconds", descending: true };
  panel.append(h("section", {}, place, details));
  draw(values.filter ?? "", sort);
  if (asked) {
    const row = data.tables.op.rows.find((each) => each.operations.includes(asked.index));
    if (row) {
      made.set({ chosen: keyOf(row) });
      replace(details, detail("op", row));
      details.scrollIntoView({ block: "nearest" });
    } else {
      replace(details, h("p", {}, `${asked.name} did not run in the capture.`));
    }
  }
}

function columns(by) {
  const rows = data.tables[by].rows;
  const bounds = rows.some((row) => row.bound_seconds !== null);
  const plans = rows.some((row) => row.planned_seconds !== null);
  const top = Math.max(...rows.map((row) => row.share));
  const one = (row) => operations[row.operations[0]];
  const out = [
    {
      key: "key",
      label: LABELS[by],
      value: (row) => row.key,
      text: true,
      wide: by !== "class",
      show: (row, value) => h("span", { class: "mono" }, (by === "source" ? source(value) : value) || "(none)"),
    },
    {
      key: "seconds",
      label: "Time",
      value: (row) => row.seconds,
      show: (row, value) => seconds(value),
      help: "Self time, summed over devices and threads",
    },
    {
      key: "share",
      label: "Share",
      value: (row) => row.share,
      show: (row, value) => shareCell(value / top, percent(value)),
    },
    bounds && {
      key: "times_bound",
      label: "× bound",
      value: (row) => row.times_bound,
      show: (row, value) => times(value),
      help: "Measured time over the roofline's least time",
    },
    by !== "source" && {
      key: "source",
      label: "Source",
      value: (row) => row.source,
      text: true,
      wide: true,
      show: (row, value) => h("span", { class: "source" }, source(value)),
    },
    by === "op" && {
      key: "scope",
      label: "Module",
      value: (row) => one(row).scope,
      text: true,
      wide: true,
      show: (row, value) => (value || NONE) + (one(row).backward ? " (backward)" : ""),
    },
    by === "op" && { key: "category", label: "Class", value: (row) => row.category, text: true },
    { key: "count", label: "Runs", value: (row) => row.count, show: (row, value) => count(value) },
    by === "op" && {
      key: "once",
      label: "One run",
      value: (row) => row.seconds / row.count,
      show: (row, value) => seconds(value),
    },
    bounds &&
      by === "op" && {
        key: "bound",
        label: "Bound",
        value: (row) => one(row).bound ?? "",
        text: true,
        show: (row, value) => value || NONE,
        help: "What the roofline says that it waits for",
      },
    plans && {
      key: "over",
      label: "× planned",
      value: (row) => (row.planned_seconds ? row.seconds / row.planned_seconds : null),
      show: (row, value) => times(value),
      help: "Measured time over what fornax plan expects",
    },
    {
      key: "flops_rate",
      label: "FLOP/s",
      value: (row) => row.flops_rate || null,
      show: (row, value) => si(value, "FLOP/s"),
    },
    {
      key: "bytes_rate",
      label: "Bytes/s",
      value: (row) => row.bytes_rate || null,
      show: (row, value) => si(value, "B/s"),
    },
    data.tables[by].steps.length > 1 && {
      key: "spread",
      label: "Steps",
      value: (row) => spread(row.by_step),
      show: (row) => spark(row.by_step),
      help: "Time in each step; sorts by the spread",
    },
  ];
  return out.filter(Boolean);
}

function spread(values) {
  return Math.max(...values) - Math.min(...values);
}

function spark(values) {
  const [width, height] = [84, 20];
  const top = Math.max(...values) || 1;
  const points = values.map(
    (value, at) =>
      `${(1 + (at / Math.max(1, values.length - 1)) * (width - 2)).toFixed(1)},${(height - 1 - (value / top) * (height - 2)).toFixed(1)}`,
  );
  return s(
    "svg",
    {
      width,
      height,
      class: "spark",
      role: "img",
      "aria-label": `${seconds(Math.min(...values))} to ${seconds(Math.max(...values))} per step`,
    },
    s("polyline", { points: points.join(" ") }),
  );
}

function detail(by, row) {
  const known = row.operations.map((index) => operations[index]);
  const head = [h("h2", { class: "mono" }, row.key || "(none)")];
  if (by === "op") return [...head, operationFacts(known[0]), operationLinks(known[0], "operations")];
  const inside = [...known].sort((a, b) => b.seconds - a.seconds);
  const made = table({
    caption: `Operations of ${row.key}`,
    rows: inside,
    key: (each) => each.index,
    filterLabel: null,
    columns: [
      {
        key: "name",
        label: "Operation",
        value: (each) => each.name,
        text: true,
        show: (each) => h("span", { class: "mono" }, each.name),
      },
      { key: "category", label: "Class", value: (each) => each.category, text: true },
      { key: "seconds", label: "Time", value: (each) => each.seconds, show: (each, value) => seconds(value) },
      { key: "share", label: "Of all", value: (each) => each.share, show: (each, value) => percent(value) },
      { key: "where", label: "", value: () => "", text: true, show: (each) => operationLinks(each, "") },
    ],
  });
  return [...head, made.element];
}

// Lines around a place in source, the line itself marked; nothing where the page does not hold them.
function excerpt(place) {
  const [first, lines] = data.excerpts[place] ?? [0, []];
  if (lines.length === 0) return null;
  const asked = Number(place.match(/:(\d+)/)[1]);
  return h(
    "pre",
    { class: "excerpt", tabindex: "0", "aria-label": `Source around line ${asked}` },
    lines.map((text, at) =>
      h(first + at === asked ? "mark" : "span", {}, `${String(first + at).padStart(5)}  ${text}\n`),
    ),
  );
}

// All that is known of one operation.
export function operationFacts(each) {
  return h("div", {}, facts(each), excerpt(each.source) ?? excerpt(each.fornax_source));
}

function facts(each) {
  const once = each.count ? each.seconds / each.count : null;
  return pairs([
    [
      "time",
      each.count
        ? `${seconds(each.seconds)} in ${count(each.count)} ${each.count === 1 ? "run" : "runs"}, ${percent(each.share)} of all`
        : "did not run",
    ],
    [
      "one run",
      once === null
        ? null
        : `${seconds(once)}${each.bound_seconds ? `, roofline ${seconds(each.bound_seconds)}` : ""}${each.planned_seconds ? `, planned ${seconds(each.planned_seconds)}` : ""}`,
    ],
    ["roofline", each.bound && boundText(each, times)],
    [
      "work of a run",
      each.flops || each.bytes
        ? `${si(each.flops, "FLOP")}, ${bytes(each.bytes)}${each.flops && each.bytes ? `, ${(each.flops / each.bytes).toPrecision(3)} FLOP/byte` : ""}`
        : null,
    ],
    ["class", [each.category, each.opcode, each.dtype].filter(Boolean).join(", ")],
    ["module", each.scope ? each.scope + (each.backward ? " (backward)" : "") : null],
    ["source", h("span", { class: "source" }, each.source || "not known")],
    [
      "in fornax",
      each.fornax_source && each.fornax_source !== each.source
        ? h("span", { class: "source" }, each.fornax_source)
        : null,
    ],
    ["op_name", each.op_name && h("span", { class: "source" }, each.op_name)],
    ["program", programName(each)],
  ]);
}
