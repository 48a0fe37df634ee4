// What the capture says at a glance: step time by cause, the most expensive operations, what was left out.

import { go } from "fornax/address.js";
import { h, hideCard, pairs, s, showCard } from "fornax/dom.js";
import { bytes, count, NONE, percent, seconds, si, source, times } from "fornax/format.js";
import { table } from "fornax/table.js";
import { boundText, CAUSES, ceilings, data, median, operations, programName } from "profile/model.js";
import { choice, legend, link, NO_OPERATIONS, operationLinks, sized } from "profile/parts.js";

const HEIGHT = 240;
const LEFT = 62;

export function overview(panel) {
  const drawing = stepBars();
  panel.append(...notices(), figures(), drawing.element, expensive(), classes());
  return drawing.end;
}

function notices() {
  const { info } = data;
  const said = [];
  if (info.truncated)
    said.push(
      "The capture is truncated: it reached its limit of time or size before it ended. Totals are of what it holds.",
    );
  if (data.shortest) {
    const left = data.rows.reduce((sum, row) => sum + row.left_out, 0);
    said.push(
      `The time line leaves out ${count(left)} events shorter than ${seconds(data.shortest / 1e9)}; tables count them.`,
    );
  }
  said.push(...info.notes);
  return said.map((text) => h("p", { class: "notice", role: "note" }, text));
}

function stepSeconds(steps) {
  return steps.map((step) => (step.end - step.begin) / 1e9);
}

function sums(steps) {
  const out = {};
  for (const cause of Object.keys(CAUSES)) out[cause] = steps.reduce((sum, step) => sum + (step.causes[cause] ?? 0), 0);
  return out;
}

function figures() {
  const { steps } = data;
  const total = stepSeconds(steps).reduce((sum, each) => sum + each, 0);
  const rows = data.tables.op.rows;
  const device = rows.reduce((sum, row) => sum + row.seconds, 0);
  const flops = rows.reduce((sum, row) => sum + row.flops, 0);
  const wall = total / data.info.ranks.length || data.info.seconds;
  const peak = Math.max(0, ...data.memory.map((each) => each.bytes));
  const shown = [];
  if (steps.length) {
    const [cause, most] = Object.entries(sums(steps)).sort((a, b) => b[1] - a[1])[0];
    const all = stepSeconds(steps);
    shown.push([
      seconds(median(all)),
      `median of ${count(steps.length)} steps (${seconds(Math.min(...all))} to ${seconds(Math.max(...all))})`,
    ]);
    shown.push([percent(most / total), `of step time: ${cause}`]);
  }
  shown.push([seconds(device), "operations, summed over threads and devices"]);
  if (flops) shown.push([si(flops / wall, "FLOP/s"), `all devices, over the steps' time${ofPeak(wall)}`]);
  if (peak) shown.push([bytes(peak), "peak memory of one device"]);
  return h(
    "div",
    { class: "figures" },
    shown.map(([value, label]) => h("div", { class: "figure" }, h("b", {}, value), h("span", {}, label))),
  );
}

// Share of what the devices could compute in the steps' time; empty where a rate is not known.
function ofPeak(wall) {
  const { peaks } = ceilings();
  const working = operations.filter((each) => each.flops > 0 && each.count > 0);
  if (working.some((each) => !peaks.has(each.dtype))) return "";
  const least = working.reduce((sum, each) => sum + (each.flops * each.count) / peaks.get(each.dtype), 0);
  return `: ${percent(least / (wall * data.info.devices), 2)} of their peak`;
}

function stepBars() {
  const section = h("section", {}, h("h2", {}, "Step time by cause"));
  if (data.steps.length === 0) {
    section.append(
      h(
        "p",
        { class: "lead" },
        "The capture holds no steps: annotate them with jax.profiler.StepTraceAnnotation, or capture through fornax train or serve. Tables below cover all of it.",
      ),
    );
    return { element: section, end: null };
  }
  let rank = data.info.ranks[0];
  const steps = () => data.steps.filter((step) => step.rank === rank);
  const lead = h("p", { class: "lead" });
  const drawing = sized((width) => bars(steps(), width));
  const asTable = h("div");
  const say = () => {
    const all = sums(steps());
    const total = Object.values(all).reduce((sum, each) => sum + each, 0);
    const parts = Object.entries(all)
      .filter(([, value]) => value / total >= 1e-4)
      .sort((a, b) => b[1] - a[1]);
    lead.textContent = `Every nanosecond of a step is under one cause: ${parts.map(([cause, value]) => `${cause} ${percent(value / total, 2)}`).join(", ")}.`;
    asTable.replaceChildren(stepTable(steps()).element);
  };
  say();
  if (data.info.ranks.length > 1) {
    section.append(
      choice(
        "Rank",
        data.info.ranks.map((each) => [each, each]),
        rank,
        (value) => {
          rank = Number(value);
          say();
          drawing.again();
        },
      ),
    );
  }
  section.append(
    lead,
    legend(
      Object.fromEntries(Object.entries(CAUSES).filter(([cause]) => data.steps.some((step) => step.causes[cause] > 0))),
    ),
    drawing.element,
    h("details", {}, h("summary", {}, "As a table"), asTable),
  );
  return { element: section, end: drawing.end };
}

function stepTable(steps) {
  const columns = [
    {
      key: "number",
      label: "Step",
      value: (step) => step.number,
      show: (step, value) => link(count(value), "timeline", { step: step.number, rank: step.rank }),
    },
    {
      key: "seconds",
      label: "Time",
      value: (step) => (step.end - step.begin) / 1e9,
      show: (step, value) => seconds(value),
    },
    ...Object.keys(CAUSES).map((cause) => ({
      key: cause,
      label: cause,
      value: (step) => step.causes[cause] ?? 0,
      show: (step, value) => seconds(value),
    })),
  ];
  return table({ caption: "Steps", columns, rows: steps, key: (step) => step.number, filterLabel: null });
}

function bars(steps, width) {
  const top = Math.max(...stepSeconds(steps)) || 1;
  const inner = width - LEFT - 6;
  const each = Math.min(90, inner / steps.length);
  const y = (value) => 8 + (HEIGHT - 36) * (1 - value / top);
  const rough = 10 ** Math.floor(Math.log10(top / 3));
  const interval = [1, 2, 5, 10].map((size) => size * rough).find((size) => top / size <= 5);
  const marks = Array.from({ length: Math.floor(top / interval) + 1 }, (_, at) => at * interval);
  const every = Math.ceil(34 / each);
  const svg = s(
    "svg",
    {
      width,
      height: HEIGHT,
      role: "img",
      "aria-label": "Time of each step, stacked by cause; the table below has the figures",
    },
    marks.map((mark) => [
      s("line", { x1: LEFT, x2: width - 6, y1: y(mark), y2: y(mark), style: { stroke: "var(--line)" } }),
      s("text", { x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end", class: "axis" }, seconds(mark, 2)),
    ]),
    steps.map((step, at) => {
      let below = 0;
      const column = s(
        "g",
        { class: "column" },
        Object.entries(CAUSES).map(([cause, colour]) => {
          const value = step.causes[cause] ?? 0;
          if (value <= 0) return null;
          const from = y(below);
          below += value;
          return s("rect", {
            x: LEFT + at * each + each * 0.08,
            width: Math.max(0.5, each * 0.84),
            y: y(below),
            height: Math.max(0, from - y(below)),
            style: { fill: `var(--${colour})` },
          });
        }),
        at % every === 0
          ? s(
              "text",
              { x: LEFT + (at + 0.5) * each, y: HEIGHT - 10, "text-anchor": "middle", class: "axis" },
              count(step.number),
            )
          : null,
        s("rect", { x: LEFT + at * each, width: each, y: 0, height: HEIGHT - 24, fill: "transparent" }),
      );
      column.addEventListener("pointermove", (event) =>
        showCard(
          event.clientX,
          event.clientY,
          h("b", {}, `${step.name} ${step.number}: ${seconds((step.end - step.begin) / 1e9)}`),
          pairs(
            Object.keys(CAUSES)
              .filter((cause) => step.causes[cause] > 0)
              .map((cause) => [
                cause,
                `${seconds(step.causes[cause])} (${percent(step.causes[cause] / ((step.end - step.begin) / 1e9), 2)})`,
              ]),
          ),
        ),
      );
      column.addEventListener("pointerleave", hideCard);
      column.addEventListener("click", () => go("timeline", { step: step.number, rank: step.rank }));
      return column;
    }),
  );
  return svg;
}

function expensive() {
  const most = [...operations]
    .filter((each) => each.seconds > 0)
    .sort((a, b) => b.seconds - a.seconds)
    .slice(0, 5);
  const section = h("section", {}, h("h2", {}, "Most expensive operations"));
  if (most.length === 0) section.append(h("p", { class: "lead" }, NO_OPERATIONS));
  section.append(
    ...most.map((each, at) =>
      h(
        "article",
        { class: "costly" },
        h("div", { class: "rank soft", "aria-hidden": "true" }, at + 1),
        h(
          "div",
          {},
          h(
            "div",
            {},
            link(each.name, "operations", { operation: each.index }),
            " ",
            h(
              "span",
              { class: "soft" },
              [each.category, each.backward ? "backward" : "", each.scope, programName(each)]
                .filter(Boolean)
                .join(" · "),
            ),
          ),
          h(
            "div",
            { class: "source soft" },
            each.source || each.fornax_source ? source(each.source || each.fornax_source) : "source not known",
          ),
          h("div", { class: each.timesBound > 3 ? "warn" : "soft" }, boundText(each, times)),
        ),
        h(
          "div",
          { class: "amount" },
          h("b", {}, percent(each.share)),
          h("span", { class: "soft" }, `${seconds(each.seconds)} in ${count(each.count)} ${each.count === 1 ? "run" : "runs"}`),
        ),
        operationLinks(each, "operations"),
      ),
    ),
  );
  return section;
}

function classes() {
  const rows = data.tables.class.rows;
  const columns = [
    {
      key: "key",
      label: "Class",
      value: (row) => row.key,
      text: true,
      show: (row, value) => link(value || NONE, "operations", { by: "op", filter: `^${value}$` }),
    },
    { key: "seconds", label: "Time", value: (row) => row.seconds, show: (row, value) => seconds(value) },
    { key: "share", label: "Share", value: (row) => row.share, show: (row, value) => percent(value) },
    {
      key: "flops_rate",
      label: "FLOP/s",
      value: (row) => row.flops_rate,
      show: (row, value) => (value ? si(value, "FLOP/s") : NONE),
    },
    {
      key: "bytes_rate",
      label: "Bytes/s",
      value: (row) => row.bytes_rate,
      show: (row, value) => (value ? si(value, "B/s") : NONE),
    },
    {
      key: "times_bound",
      label: "Times the bound",
      value: (row) => row.times_bound,
      show: (row, value) => times(value),
    },
  ];
  return h(
    "section",
    {},
    h("h2", {}, "By class"),
    table({ caption: "Time by class of operation", columns, rows, key: (row) => row.key, filterLabel: null }).element,
  );
}
