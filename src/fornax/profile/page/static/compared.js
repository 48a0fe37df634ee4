// Another capture beside this one: the verdict, and what changed with its interval.

import { keep } from "fornax/address.js";
import { h, hideCard, pairs, s, showCard } from "fornax/dom.js";
import { count, NONE, number, percent, seconds, si, source, times } from "fornax/format.js";
import { table } from "fornax/table.js";
import { data, operations } from "profile/model.js";
import { link, sized } from "profile/parts.js";

const KINDS = { slower: "bad", new: "bad", faster: "good", gone: "good", same: "soft" };
const DRAWN = 24;
const ROW = 26;

const known = (value) => value !== null && value !== undefined;

export function compared(panel, values) {
  const { compared: found } = data;
  const { before, after, step } = found;
  const figure = (value, label) => h("div", { class: "figure" }, h("b", {}, value), h("span", {}, label));
  const tone = found.failed ? "bad" : step.high < 1 ? "good" : "";
  panel.append(
    h(
      "section",
      {},
      h("h2", { class: tone }, found.failed ? "Slower than allowed" : "Not slower than allowed"),
      h("p", { class: "verdict" }, found.verdict),
      found.notes.map((note) => h("p", { class: "soft" }, note)),
    ),
    h(
      "div",
      { class: "figures" },
      figure(
        times(step.value),
        `of a step's time before${known(step.low) ? `: ${number(step.low, 4)} to ${number(step.high, 4)}` : ""}`,
      ),
      figure(
        `${seconds(before.seconds)} → ${seconds(after.seconds)}`,
        `a step's operations and waiting, ${count(before.steps)} and ${count(after.steps)} steps`,
      ),
      figure(change(before.flops, after.flops), `FLOPs of a step, ${si(after.flops, "FLOP")}`),
      figure(change(before.bytes, after.bytes), `bytes of a step, ${si(after.bytes, "B")}`),
      before.waited_seconds || after.waited_seconds
        ? figure(`${seconds(before.waited_seconds)} → ${seconds(after.waited_seconds)}`, "of it waiting for input and exchanges")
        : null,
      found.calibrated
        ? figure(
            times(found.machine),
            `the machine's doing, from ${count(found.calibrated)} operations that are the same; taken out`,
          )
        : null,
    ),
  );
  const shown = found.changes.filter((each) => each.kind !== "same").slice(0, DRAWN);
  const drawing = sized((width) => plot(shown, found, width));
  if (shown.length) {
    panel.append(
      h(
        "section",
        {},
        h("h2", {}, "What changed"),
        h(
          "p",
          { class: "lead" },
          `Time over the time before, with its interval; the shaded part is what a step may take, ${percent(found.fail_over)} more. Bars that miss 1 are beyond noise.`,
        ),
        drawing.element,
      ),
    );
  }
  panel.append(h("section", {}, h("h2", {}, "All"), all(found, values)));
  return drawing.end;
}

function change(before, after) {
  if (before === after) return "unchanged";
  return before ? `${after > before ? "+" : "−"}${percent(Math.abs(after / before - 1))}` : "new";
}

function plot(changes, found, width) {
  const left = Math.min(320, width * 0.4);
  const right = 70;
  const ratios = changes
    .flatMap(({ ratio }) => [ratio.value, ratio.low, ratio.high])
    .filter((value) => known(value) && value > 0);
  const edge = Math.max(1.1, ...ratios.map((value) => Math.max(value, 1 / value))) * 1.05;
  const x = (ratio) => left + ((Math.log(ratio) / Math.log(edge) + 1) / 2) * (width - left - right);
  const height = changes.length * ROW + 34;
  const marks = [1 / edge, 1 / Math.sqrt(edge), 1, Math.sqrt(edge), edge];
  const room = Math.floor(left / 6.8);
  return s(
    "svg",
    {
      width,
      height,
      role: "img",
      "aria-label": "Ratios of what changed, with intervals; the table below has the figures",
    },
    s("rect", {
      x: x(1),
      width: Math.max(0, x(Math.min(edge, 1 + found.fail_over)) - x(1)),
      y: 0,
      height: height - 26,
      style: { fill: "var(--line)", opacity: 0.6 },
    }),
    marks.map((mark) => [
      s("line", {
        x1: x(mark),
        x2: x(mark),
        y1: 0,
        y2: height - 26,
        style: { stroke: mark === 1 ? "var(--ink)" : "var(--line)" },
      }),
      s("text", { x: x(mark), y: height - 8, "text-anchor": "middle", class: "axis" }, times(mark)),
    ]),
    changes.map((each, at) => {
      const y = at * ROW + ROW / 2;
      const colour = `var(--${KINDS[each.kind]})`;
      const { value, low, high } = each.ratio;
      const name = each.key.length > room ? `${each.key.slice(0, room - 1)}…` : each.key;
      const row = s(
        "g",
        {},
        s("rect", { x: 0, y: at * ROW, width, height: ROW, fill: "transparent" }),
        s("text", { x: 0, y: y + 4 }, name),
        known(low)
          ? s("line", { x1: x(low), x2: x(high), y1: y, y2: y, style: { stroke: colour, "stroke-width": 3 } })
          : null,
        known(value)
          ? s("circle", { cx: x(value), cy: y, r: 5, style: { fill: colour } })
          : s("text", { x: x(1) + 8, y: y + 4, style: { fill: colour } }, each.kind),
        s("text", { x: width, y: y + 4, "text-anchor": "end", class: "axis" }, signed(each.share)),
      );
      row.addEventListener("pointermove", (event) =>
        showCard(
          event.clientX,
          event.clientY,
          h("b", {}, each.key),
          pairs([
            ["what", each.kind],
            ["before", seconds(each.before_seconds)],
            ["after", seconds(each.after_seconds)],
            ["of a step", signed(each.share)],
            ["source", each.source],
          ]),
        ),
      );
      row.addEventListener("pointerleave", hideCard);
      return row;
    }),
  );
}

function signed(share) {
  if (Math.abs(share) < 1e-4) return "0 %";
  return `${share >= 0 ? "+" : "−"}${percent(Math.abs(share), 2)}`;
}

function all(found, values) {
  const columns = [
    {
      key: "key",
      label: "What",
      value: (row) => row.key,
      text: true,
      wide: true,
      show: (row, value) => named(row, value),
    },
    {
      key: "kind",
      label: "Change",
      value: (row) => row.kind,
      text: true,
      show: (row, value) => h("span", { class: KINDS[value] }, value),
    },
    { key: "share", label: "Of a step", value: (row) => row.share, show: (row, value) => signed(value) },
    { key: "before", label: "Before", value: (row) => row.before_seconds, show: (row, value) => seconds(value) },
    { key: "after", label: "After", value: (row) => row.after_seconds, show: (row, value) => seconds(value) },
    {
      key: "ratio",
      label: "Ratio",
      value: (row) => row.ratio.value,
      show: ({ ratio }) =>
        known(ratio.value)
          ? `${number(ratio.value, 3)}${known(ratio.low) ? ` [${number(ratio.low, 3)}, ${number(ratio.high, 3)}]` : ""}`
          : NONE,
    },
    {
      key: "p",
      label: "p",
      value: (row) => row.p_value,
      show: (row, value) => (known(value) ? number(value, 2) : NONE),
      help: "That so large a change is noise",
    },
    {
      key: "flops",
      label: "FLOPs",
      value: (row) => row.after_flops - row.before_flops,
      show: (row) => change(row.before_flops, row.after_flops),
    },
    {
      key: "bytes",
      label: "Bytes",
      value: (row) => row.after_bytes - row.before_bytes,
      show: (row) => change(row.before_bytes, row.after_bytes),
    },
    { key: "category", label: "Class", value: (row) => row.category, text: true },
    {
      key: "source",
      label: "Source",
      value: (row) => row.source,
      text: true,
      wide: true,
      show: (row, value) => h("span", { class: "source" }, source(value)),
    },
  ];
  return table({
    caption: "Changes",
    columns,
    rows: found.changes,
    key: (row) => `${row.program} ${row.key}`,
    filter: values.filter ?? "",
    changed: ({ filter }) => keep({ filter }),
  }).element;
}

// The operation's name leads to it where it is one operation of this capture.
function named(row, text) {
  const here =
    row.after_operations.length === 1
      ? operations.find((each) => each.name === row.after_operations[0] && each.count)
      : null;
  return here ? link(text, "operations", { operation: here.index }) : text;
}
