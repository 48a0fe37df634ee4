// The hosts' side: stages of the input pipeline, threads and what they waited for, garbage collection, counters.

import { h } from "fornax/dom.js";
import { count, NONE, percent, seconds } from "fornax/format.js";
import { shareCell, table } from "fornax/table.js";
import { counters } from "profile/counters.js";
import { data } from "profile/model.js";
import { link } from "profile/parts.js";

export function host(panel, values) {
  const [section, end] = counters(values.counter);
  panel.append(stages(), threads(), waits(), collections(), section);
  return end;
}

function part(title, lead, ...children) {
  return h("section", {}, h("h2", {}, title), h("p", { class: "lead" }, lead), ...children);
}

function stages() {
  if (data.input.length === 0)
    return part("Input pipeline", "Absent: no stage of an input pipeline is in the capture (events named input/…).");
  const steps = data.steps.reduce((sum, step) => sum + (step.end - step.begin) / 1e9, 0);
  const waited = data.input.reduce((sum, stage) => sum + stage.waited_seconds, 0);
  const [first] = data.input;
  const lead =
    waited > 0
      ? `Steps waited ${seconds(waited)} for input${steps ? `, ${percent(waited / steps, 2)} of their time` : ""}; the longest for ${first.name}.`
      : "No step waited for input.";
  const columns = [
    { key: "name", label: "Stage", value: (row) => row.name, text: true },
    {
      key: "waited",
      label: "Steps waited",
      value: (row) => row.waited_seconds,
      show: (row, value) => shareCell(waited ? value / waited : 0, seconds(value)),
    },
    { key: "seconds", label: "Time in it", value: (row) => row.seconds, show: (row, value) => seconds(value) },
    { key: "count", label: "Times", value: (row) => row.count, show: (row, value) => count(value) },
    { key: "once", label: "Once", value: (row) => row.seconds / row.count, show: (row, value) => seconds(value) },
  ];
  return part(
    "Input pipeline",
    lead,
    table({
      caption: "Stages of the input pipeline",
      columns,
      rows: data.input,
      key: (row) => row.name,
      filterLabel: null,
    }).element,
  );
}

function threads() {
  if (data.threads.length === 0) return part("Threads", "Absent: the capture holds no thread of a host.");
  const { seconds: whole } = data.info;
  const many = data.info.ranks.length > 1;
  const columns = [
    many && { key: "rank", label: "Rank", value: (row) => row.rank },
    {
      key: "name",
      label: "Thread",
      value: (row) => row.name,
      text: true,
      show: (row, value) => h("span", { class: "mono" }, value),
    },
    {
      key: "busy",
      label: "Working",
      value: (row) => row.busy_seconds - row.waiting_seconds,
      show: (row, value) => seconds(value),
      help: "Under an event that does not wait",
    },
    {
      key: "share",
      label: "Of the capture",
      value: (row) => (row.busy_seconds - row.waiting_seconds) / whole,
      show: (row, value) => shareCell(value, percent(value, 2)),
    },
    {
      key: "waiting",
      label: "Waiting",
      value: (row) => row.waiting_seconds,
      show: (row, value) => seconds(value),
      help: "Under an event that waits for a device, a lock or a thread",
    },
    {
      key: "idle",
      label: "No event",
      value: (row) => Math.max(0, whole - row.busy_seconds),
      show: (row, value) => (whole ? percent(value / whole, 2) : NONE),
    },
  ];
  return part(
    "Threads",
    `Over ${seconds(whole)} of capture.`,
    table({
      caption: "Threads of hosts",
      columns: columns.filter(Boolean),
      rows: data.threads,
      key: (row) => `${row.rank} ${row.name}`,
      sort: { key: "busy", descending: true },
    }).element,
  );
}

const KINDS = {
  lock: "a lock of Python",
  buffer: "a buffer that another run holds",
  threads: "other threads",
  device: "results of a device",
};

function waits() {
  const many = data.info.ranks.length > 1;
  const columns = [
    many && { key: "rank", label: "Rank", value: (row) => row.rank },
    {
      key: "name",
      label: "Event, or who asked for the lock",
      value: (row) => row.name,
      text: true,
      wide: true,
      show: (row, value) => h("span", { class: "mono" }, value),
    },
    { key: "kind", label: "Waited for", value: (row) => KINDS[row.kind], text: true },
    { key: "threads", label: "Threads", value: (row) => row.threads, show: (row, value) => count(value) },
    { key: "count", label: "Times", value: (row) => row.count, show: (row, value) => count(value) },
    {
      key: "seconds",
      label: "Time",
      value: (row) => row.seconds,
      show: (row, value) => seconds(value),
      help: "Summed over threads",
    },
  ];
  const unknown = data.locks_unknown.map((each) => h("li", {}, each));
  return part(
    "What threads waited for",
    data.waits.length ? "Times of events in which a thread waits." : "The capture holds no event in which a thread waits.",
    data.waits.length
      ? table({
          caption: "What threads waited for",
          columns: columns.filter(Boolean),
          rows: data.waits,
          key: (row) => `${row.rank} ${row.kind} ${row.name}`,
          sort: { key: "seconds", descending: true },
        }).element
      : null,
    unknown.length ? [h("p", { class: "lead" }, "Not known from this capture:"), h("ul", { class: "soft" }, unknown)] : null,
  );
}

function collections() {
  if (data.collections.length === 0)
    return part("Garbage collection", "No garbage collection of Python ran during the capture, or none was recorded.");
  const total = data.collections.reduce((sum, each) => sum + each.duration, 0) / 1e9;
  const columns = [
    { key: "rank", label: "Rank", value: (row) => row.rank },
    {
      key: "begin",
      label: "At",
      value: (row) => row.begin,
      show: (row, value) =>
        link(seconds(value / 1e9), "timeline", { from: value - row.duration * 2, to: value + row.duration * 3 }),
    },
    { key: "duration", label: "Took", value: (row) => row.duration, show: (row, value) => seconds(value / 1e9) },
    { key: "generation", label: "Generation", value: (row) => row.generation },
  ];
  return part(
    "Garbage collection",
    `${count(data.collections.length)} collections of Python took ${seconds(total)}.`,
    table({
      caption: "Garbage collections",
      columns,
      rows: data.collections,
      key: (row) => row.begin,
      sort: { key: "duration", descending: true },
      filterLabel: null,
    }).element,
  );
}
