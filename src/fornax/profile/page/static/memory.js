// Memory of programs as the compiler assigned it, over their schedule and at the peak; and what allocators said.

import { keep } from "fornax/address.js";
import { chart } from "fornax/chart.js";
import { h, replace } from "fornax/dom.js";
import { bytes, count, NONE, percent, seconds, source } from "fornax/format.js";
import { shareCell, table } from "fornax/table.js";
import { data, OWNERS } from "profile/model.js";
import { choice, nothing } from "profile/parts.js";

export function memory(panel, values) {
  const ends = [];
  if (data.memory.length === 0) {
    panel.append(nothing("No program in the capture carries a buffer assignment."));
  } else {
    const largest = data.memory.reduce((best, each, at) => (each.bytes > data.memory[best].bytes ? at : best), 0);
    const asked = data.memory[values.program] ? Number(values.program) : largest;
    const body = h("div");
    let end = () => {};
    const show = (at) => {
      end();
      replace(body);
      end = program(body, data.memory[at], values.filter ?? "");
    };
    const entries = data.memory.map((each, at) => [at, `${data.programs[each.program].name} (${bytes(each.bytes)})`]);
    panel.append(
      h(
        "div",
        { class: "bar" },
        choice("Program", entries, asked, (value) => {
          keep({ program: value });
          show(Number(value));
        }),
      ),
      body,
    );
    show(asked);
    ends.push(() => end());
  }
  panel.append(allocators(ends));
  return () => ends.forEach((end) => end());
}

function program(body, each, filter) {
  const figure = (value, label) => h("div", { class: "figure" }, h("b", {}, value), h("span", {}, label));
  const owners = Object.entries(each.owners)
    .filter(([, value]) => value > 0)
    .sort((a, b) => b[1] - a[1]);
  const { course } = each;
  const where = h("p", { class: "lead", role: "status" });
  const total = (at) => Object.values(course.owners).reduce((sum, values) => sum + values[at], 0);
  const peakAt = course.position.reduce((best, _, at) => (total(at) > total(best) ? at : best), 0);
  const say = (at) => {
    where.textContent = `${at === peakAt ? "Peak" : "Live"} at ${course.instruction[at]}: ${bytes(total(at))}.`;
  };
  body.append(
    h(
      "div",
      { class: "figures" },
      figure(bytes(each.bytes), "peak on one device"),
      figure(bytes(each.temporaries), "of it temporary"),
      owners.map(([owner, value]) => figure(bytes(value), `${owner}, ${percent(value / each.bytes, 2)}`)),
    ),
  );
  let made = null;
  const over = h("section", {}, h("h2", {}, "Over the program's schedule"));
  if (course.position.length > 1) {
    const shown = Object.keys(course.owners).filter((owner) => course.owners[owner].some((value) => value > 0));
    made = chart({
      label: `Live bytes over the schedule by owner, peak ${bytes(each.bytes)} at ${each.instruction}`,
      height: 280,
      stacked: true,
      xLabel: "position in the program",
      yFormat: (value) => bytes(value),
      yBinary: true,
      xFormat: count,
      data: {
        x: course.position,
        series: shown.map((owner) => ({ label: owner, colour: OWNERS[owner], y: course.owners[owner] })),
      },
      hover: (at) => say(at ?? peakAt),
    });
    say(peakAt);
    over.append(where, made.element);
  } else {
    over.append(h("p", { class: "lead" }, "The course of this program is not known."));
  }
  const top = Math.max(...each.buffers.map((row) => row.bytes)) / each.bytes;
  const columns = [
    {
      key: "name",
      label: "Buffer",
      value: (row) => row.name,
      text: true,
      wide: true,
      show: (row, value) => h("span", { class: "mono" }, value),
    },
    {
      key: "owner",
      label: "Owner",
      value: (row) => row.owner,
      text: true,
      show: (row, value) =>
        h("span", {}, h("span", { class: "key", style: { background: `var(--${OWNERS[value]})` } }), value),
    },
    { key: "bytes", label: "Size", value: (row) => row.bytes, show: (row, value) => bytes(value) },
    {
      key: "share",
      label: "Of the peak",
      value: (row) => row.bytes / each.bytes,
      show: (row, value) => shareCell(value / top, percent(value)),
    },
    {
      key: "op_name",
      label: "What",
      value: (row) => row.op_name,
      text: true,
      wide: true,
      show: (row, value) => h("span", { class: "source" }, value || NONE),
    },
    {
      key: "source",
      label: "Source",
      value: (row) => row.source || row.fornax_source,
      text: true,
      wide: true,
      show: (row, value) => h("span", { class: "source" }, source(value)),
    },
    { key: "kind", label: "Kind", value: (row) => row.kind, text: true },
    {
      key: "shape",
      label: "Shape",
      value: (row) => row.shape,
      text: true,
      wide: true,
      show: (row, value) => h("span", { class: "mono" }, value),
    },
    {
      key: "padding",
      label: "Padding",
      value: (row) => row.bytes - row.unpadded_bytes,
      show: (row, value) => (value > 0 ? bytes(value) : NONE),
      help: "Bytes that tiles add",
    },
  ];
  const rest = each.buffers_left_out;
  body.append(
    over,
    h(
      "section",
      {},
      h("h2", {}, "At the peak"),
      rest.count
        ? h(
            "p",
            { class: "lead" },
            `The ${count(each.buffers.length)} largest buffers; ${count(rest.count)} smaller ones hold ${bytes(rest.bytes)}.`,
          )
        : null,
      table({
        caption: "Buffers at the peak",
        columns,
        rows: each.buffers,
        key: (row) => row.name,
        sort: { key: "bytes", descending: true },
        filter,
        changed: ({ filter: text }) => keep({ filter: text }),
      }).element,
    ),
  );
  return () => made?.destroy();
}

function allocators(ends) {
  const section = h("section", {}, h("h2", {}, "What allocators said"));
  if (data.samples.length === 0) {
    section.append(
      h("p", { class: "lead" }, "Absent: the devices of this capture have no memory statistics (CPUs have none)."),
    );
    return section;
  }
  const devices = Map.groupBy(data.samples, (each) => `rank ${each.rank} ${each.device}`);
  const x = [...new Set(data.samples.map((each) => each.time))].sort((a, b) => a - b);
  const at = new Map(x.map((time, index) => [time, index]));
  const series = [...devices].map(([label, samples]) => {
    const y = x.map(() => null);
    for (const each of samples) y[at.get(each.time)] = each.bytes_in_use;
    return { label, y, spanGaps: true, points: samples.length < 60 };
  });
  const made = chart({
    label: "Bytes in use by device over the capture",
    data: { x: x.map((time) => time / 1e9), series },
    xLabel: "time",
    xFormat: (value) => seconds(value),
    yFormat: (value) => bytes(value),
    yBinary: true,
    fromZero: true,
  });
  ends.push(made.destroy);
  const limits = [...devices].map(
    ([label, samples]) =>
      `${label}: at most ${bytes(Math.max(...samples.map((each) => each.peak_bytes)))}${samples[0].limit_bytes ? ` of ${bytes(samples[0].limit_bytes)}` : ""}`,
  );
  section.append(h("p", { class: "lead" }, `${limits.join("; ")}.`), made.element);
  return section;
}
