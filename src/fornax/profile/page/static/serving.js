// What a server did: each request's way through queue, prefill and decode, and how full its batches were.

import { chart } from "fornax/chart.js";
import { h, hideCard, pairs, s, showCard } from "fornax/dom.js";
import { count, NONE, percent, seconds } from "fornax/format.js";
import { table } from "fornax/table.js";
import { data, median } from "profile/model.js";
import { legend, link, nothing, sized } from "profile/parts.js";

const PHASES = { queued: "series-8", prefill: "series-2", decode: "series-1", batch: "series-1" };
const DRAWN = 400; // ways of requests
const EDGE = 28;

const hosted = data.serving.requests.some((each) => each.model);
const phases = hosted ? ["queued", "batch"] : ["queued", "prefill", "decode"];
const rowsName = data.serving.batches.some((each) => each.kind.includes("/")) ? "Rows" : "Tokens";

export function serving(panel) {
  const { requests, batches, left_out: left } = data.serving;
  const ends = [];
  if (left.requests || left.batches) {
    panel.append(
      h(
        "p",
        { class: "notice", role: "note" },
        `The page holds the first ${count(requests.length)} requests and ${count(batches.length)} batches; ${count(left.requests)} requests and ${count(left.batches)} batches are left out.`,
      ),
    );
  }
  if (requests.length) {
    const drawing = sized((width) => ways(requests.slice(0, DRAWN), width));
    ends.push(drawing.end);
    panel.append(figures(requests), ofRequests(requests, drawing.element));
  } else {
    panel.append(nothing("The capture holds no request that came, began or ended in it."));
  }
  if (batches.length) panel.append(ofBatches(batches, ends));
  return () => ends.forEach((end) => end());
}

function took(request, phase) {
  const span = request.phases[phase];
  return span ? (span[1] - span[0]) / 1e9 : null;
}

function figures(requests) {
  const figure = (value, label) => h("div", { class: "figure" }, h("b", {}, value), h("span", {}, label));
  const ended = requests.filter((each) => each.ending !== "open").length;
  const tokens = requests.map((each) => each.token_seconds).filter((each) => each !== null);
  const medians = phases.map((phase) => {
    const known = requests.map((each) => took(each, phase)).filter((each) => each !== null);
    return known.length ? figure(seconds(median(known)), `${phase}, median of ${count(known.length)}`) : null;
  });
  return h(
    "div",
    { class: "figures" },
    figure(count(requests.length), `requests, ${count(ended)} ended in the capture`),
    medians,
    tokens.length ? figure(seconds(median(tokens)), "a token after the first, median") : null,
  );
}

function ofRequests(requests, drawing) {
  const many = data.info.ranks.length > 1;
  const columns = [
    {
      key: "id",
      label: "Request",
      value: (row) => row.id,
      text: true,
      wide: true,
      show: (row, value) => h("span", { class: "mono" }, value),
    },
    many && { key: "rank", label: "Rank", value: (row) => row.rank },
    hosted && { key: "model", label: "Model", value: (row) => row.model, text: true },
    {
      key: "came",
      label: "Came at",
      value: (row) => row.queued,
      show: (row, value) => (value === null ? NONE : link(seconds(value / 1e9), "timeline", around(row))),
    },
    ...phases.map((phase) => ({
      key: phase,
      label: phase[0].toUpperCase() + phase.slice(1),
      value: (row) => took(row, phase),
      show: (row, value) => seconds(value),
    })),
    !hosted && { key: "prompt", label: "Prompt", value: (row) => row.prompt_tokens, show: (row, value) => count(value) },
    !hosted && { key: "tokens", label: "Tokens", value: (row) => row.tokens, show: (row, value) => count(value) },
    !hosted && {
      key: "token",
      label: "A token",
      value: (row) => row.token_seconds,
      show: (row, value) => seconds(value),
      help: "After the first",
    },
    !hosted && {
      key: "preempted",
      label: "Preempted",
      value: (row) => row.preempted,
      show: (row, value) => (value ? count(value) : NONE),
    },
    { key: "ending", label: "End", value: (row) => row.ending, text: true },
  ];
  const drawn = requests.length > DRAWN ? `The first ${count(DRAWN)} are drawn. ` : "";
  return h(
    "section",
    {},
    h("h2", {}, "The way of each request"),
    h("p", { class: "lead" }, `${drawn}A part that began before the capture or ended after it is left out.`),
    legend(Object.fromEntries(phases.map((phase) => [phase, PHASES[phase]]))),
    drawing,
    table({
      caption: "Requests",
      columns: columns.filter(Boolean),
      rows: requests,
      key: (row) => `${row.rank} ${row.model} ${row.id} ${row.queued}`,
    }).element,
  );
}

function around(request) {
  const times = Object.values(request.phases).flat();
  if (!times.length) return { from: request.queued, to: request.queued + 1e6 };
  return { from: Math.min(...times), to: Math.max(...times) };
}

// A line per request, its parts in their colours over the time of the capture.
function ways(requests, width) {
  const times = requests.flatMap((each) => Object.values(each.phases).flat());
  if (!times.length) return h("p", { class: "lead" }, "No part of a request lies in the capture whole.");
  const from = times.reduce((least, each) => Math.min(least, each), Infinity);
  const to = Math.max(from + 1, times.reduce((most, each) => Math.max(most, each), -Infinity));
  const line = Math.max(2, Math.min(14, 420 / requests.length));
  const height = line * requests.length + 26;
  const x = (time) => EDGE + ((width - 2 * EDGE) * (time - from)) / (to - from);
  const rough = 10 ** Math.floor(Math.log10((to - from) / 4));
  const interval = [1, 2, 5, 10].map((size) => size * rough).find((size) => (to - from) / size <= 6);
  const marks = [];
  for (let mark = Math.ceil(from / interval) * interval; mark <= to; mark += interval) marks.push(mark);
  return s(
    "svg",
    { width, height, role: "img", "aria-label": "The way of each request over time; the table below has the figures" },
    marks.map((mark) => [
      s("line", { x1: x(mark), x2: x(mark), y1: 0, y2: height - 22, style: { stroke: "var(--line)" } }),
      s("text", { x: x(mark), y: height - 8, "text-anchor": "middle", class: "axis" }, seconds(mark / 1e9)),
    ]),
    requests.map((each, at) => {
      const group = s(
        "g",
        {},
        phases.map((phase) => {
          const span = each.phases[phase];
          if (!span) return null;
          return s("rect", {
            x: x(span[0]),
            width: Math.max(1, x(span[1]) - x(span[0])),
            y: at * line,
            height: Math.max(1.5, line * 0.8),
            style: { fill: `var(--${PHASES[phase]})` },
          });
        }),
      );
      group.addEventListener("pointermove", (event) =>
        showCard(
          event.clientX,
          event.clientY,
          h("b", {}, `request ${each.id}`),
          pairs([
            ["model", each.model || null],
            ...phases.map((phase) => [phase, each.phases[phase] ? seconds(took(each, phase)) : null]),
            ["prompt", each.prompt_tokens === null ? null : `${count(each.prompt_tokens)} tokens`],
            ["sampled", each.tokens === null ? null : `${count(each.tokens)} tokens`],
            ["preempted", each.preempted || null],
            ["end", each.ending],
          ]),
        ),
      );
      group.addEventListener("pointerleave", hideCard);
      return group;
    }),
  );
}

function ofBatches(batches, ends) {
  const share = (part, whole) => (whole ? part / whole : null);
  const parts = [
    ["sequences, of their limit", (each) => share(each.sequences, each.most_sequences)],
    [`${rowsName.toLowerCase()}, of their limit`, (each) => share(each.rows, each.most_rows)],
    [`${rowsName.toLowerCase()}, of what the program computes`, (each) => each.fill],
  ];
  const series = parts
    .map(([label, of]) => ({ label, y: batches.map(of), points: batches.length < 100 }))
    .filter((each) => each.y.some((value) => value !== null));
  const made = chart({
    label: "How full each batch was, over the time of the capture",
    data: { x: batches.map((each) => each.begin / 1e9), series },
    xLabel: "time",
    xFormat: (value) => seconds(value),
    yFormat: (value) => percent(value),
    fromZero: true,
  });
  ends.push(made.destroy);
  const mean = (of) => {
    const known = batches.map(of).filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  };
  const said = parts.map(([label, of]) => [label, mean(of)]).filter(([, value]) => value !== null);
  const of = (value, most) => (most ? `${count(value)} of ${count(most)}` : count(value));
  const columns = [
    {
      key: "begin",
      label: "At",
      value: (row) => row.begin,
      show: (row, value) =>
        link(seconds(value / 1e9), "timeline", { from: value - row.duration, to: value + 2 * row.duration }),
    },
    { key: "step", label: "Step", value: (row) => row.step, show: (row, value) => count(value) },
    { key: "kind", label: "Kind", value: (row) => row.kind, text: true },
    {
      key: "sequences",
      label: hosted ? "Requests" : "Sequences",
      value: (row) => row.sequences,
      show: (row, value) => of(value, row.most_sequences),
    },
    { key: "rows", label: rowsName, value: (row) => row.rows, show: (row, value) => of(value, row.most_rows) },
    { key: "places", label: "Program computes", value: (row) => row.places, show: (row, value) => count(value) },
    { key: "fill", label: "Of it used", value: (row) => row.fill, show: (row, value) => percent(value) },
    { key: "steps", label: "Steps of the call", value: (row) => row.steps },
  ];
  return h(
    "section",
    {},
    h("h2", {}, "How full the batches were"),
    h("p", { class: "lead" }, `On average ${said.map(([label, value]) => `${percent(value)} (${label})`).join(", ")}.`),
    made.element,
    table({ caption: "Batches", columns, rows: batches, key: (row) => `${row.rank} ${row.begin}`, filterLabel: null })
      .element,
  );
}
