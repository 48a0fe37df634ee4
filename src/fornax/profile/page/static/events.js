// What the time line says of an event and of a span.

import { h, pairs } from "fornax/dom.js";
import { count, percent, seconds } from "fornax/format.js";
import { table } from "fornax/table.js";
import { between } from "profile/lanes.js";
import { data, operations } from "profile/model.js";
import { operationFacts } from "profile/operations.js";
import { link, operationLinks } from "profile/parts.js";

// All that is known of an event of a lane; times in nanoseconds.
export function factsOf(all, { track, lane, at }) {
  const { events, lanes, label } = all[track];
  const event = lanes[lane].index[at];
  return {
    name: data.names[events.name[event]],
    begin: events.begin[event],
    duration: events.duration[event],
    label,
    operation: operations[events.operation[event]] ?? null,
    step: data.steps[events.step[event]] ?? null,
  };
}

// For the card at the pointer.
export function eventCard({ name, duration, operation, step }) {
  return [
    h("b", {}, name),
    pairs([
      ["took", seconds(duration / 1e9)],
      ["class", operation?.category],
      ["module", operation?.scope],
      ["source", operation?.source],
      ["step", step && String(step.number)],
    ]),
  ];
}

// For below the time line, which begins at `zero`.
export function eventDetails({ name, begin, duration, label, operation, step }, zero) {
  return [
    h("h2", { class: "mono" }, name),
    pairs([
      ["took", seconds(duration / 1e9)],
      ["began", `${seconds((begin - zero) / 1e9, 7)} into the capture`],
      ["row", label],
      ["step", step && `${step.name} ${step.number}`],
    ]),
    operation ? [h("h3", {}, "Operation"), operationFacts(operation), operationLinks(operation, "timeline")] : null,
  ];
}

// What ran between two times.
export function spanDetails(all, { from, to }) {
  const columns = [
    {
      key: "name",
      label: "Event",
      value: (row) => row.name,
      text: true,
      show: (row, value) =>
        row.operation
          ? link(value, "operations", { operation: row.operation.index })
          : h("span", { class: "mono" }, value),
    },
    {
      key: "time",
      label: "Time",
      value: (row) => row.time,
      show: (row, value) => seconds(value / 1e9),
      help: "Summed over rows",
    },
    {
      key: "share",
      label: "Of the span",
      value: (row) => row.time / (to - from),
      show: (row, value) => percent(value),
    },
    { key: "count", label: "Runs", value: (row) => row.count, show: (row, value) => count(value) },
  ];
  const rows = between(all, from, to).slice(0, 200);
  return [
    h("h2", {}, `Span of ${seconds((to - from) / 1e9)}`),
    table({ caption: "What ran in the span", columns, rows, key: (row) => row.name, filterLabel: null }).element,
  ];
}
