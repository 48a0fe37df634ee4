// Memory and speed of a run's programs: by owner, on the roofline, and planned beside measured.

import { h, replace, s } from "fornax/dom.js";
import { NONE, bytes, number, percent, seconds, si } from "fornax/format.js";
import { grid, nothing, section } from "dashboard/parts.js";
import { get, partOf } from "dashboard/source.js";

/** The tab. */
export async function memoryView(root, { id, signal, follow }) {
  const draw = async () => {
    const answer = await get(partOf(id, "memory"), signal);
    replace(root, beside(answer), answer.programs.map((each) => program(each, answer)),
      !answer.programs.length && !answer.plan ? nothing("Neither a program nor a plan is in this run: program.json is written when the step was compiled, plan.json by `fornax plan --json`.") : null);
  };
  await draw();
  follow(["program.json", "plan.json"], draw);
}

/** What the plan said, what came. */
function beside({ plan, measured, programs }) {
  const main = programs[0];
  const said = plan?.summary ?? {};
  const rows = [
    ["time of a step", said.step_seconds ?? main?.roofline?.seconds ?? null, measured?.step_seconds ?? null, seconds],
    ["memory at the peak", said.total_bytes ?? null, main?.peak_bytes ?? null, bytes],
    ["FLOPs of a step", plan?.programs?.[0]?.flops ?? null, main?.flops ?? null, (value) => si(value)],
    ["bytes moved in a step", plan?.programs?.[0]?.bytes ?? null, main?.bytes ?? null, bytes],
    ["share of the peak FLOP/s", said.mfu ?? null, measured?.mfu ?? null, percent],
    ["tokens/s", plan?.speed?.tokens_per_second ?? null, measured?.tokens_per_second ?? null, (value) => si(value)],
  ].filter((row) => row[1] !== null || row[2] !== null);
  if (!rows.length) return null;
  return section("Planned and measured",
    plan ? h("p", { class: "lead" }, plan.how ?? "") : main?.roofline ? h("p", { class: "lead" }, "No plan.json here: the planned time is the roofline's least time for this program.") : null,
    grid("planned and measured", [
      { key: "what", label: "figure", value: (row) => row[0], text: true },
      { key: "planned", label: "planned", value: (row) => row[1], show: (row, value) => row[3](value) },
      { key: "measured", label: "measured", value: (row) => row[2], show: (row, value) => row[3](value) },
      { key: "ratio", label: "measured / planned", value: (row) => (row[1] && row[2] !== null ? row[2] / row[1] : null), show: (row, value) => (value === null ? NONE : `${number(value, 3)}×`) },
    ], rows));
}

function program(each, machine) {
  const owners = Object.entries(each.owners ?? {}).filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]);
  return section(each.name,
    each.notes?.length ? h("ul", { class: "soft" }, each.notes.map((note) => h("li", {}, note))) : null,
    h("p", { class: "lead" }, `${si(each.flops, "FLOP")} and ${bytes(each.bytes)} a run; ${bytes(each.peak_bytes)} at the peak`
      + (each.usable_bytes ? ` of ${bytes(each.usable_bytes)} that a program may use.` : ".")),
    owners.length ? [h("h3", {}, "Memory at the peak"), bar(owners, Math.max(each.usable_bytes ?? 0, each.peak_bytes ?? 0))] : null,
    each.roofline ? [h("h3", {}, "Roofline"), roofline(each.roofline, machine)] : null,
    each.buffers?.length ? [h("h3", {}, "Largest buffers"), grid("largest buffers", [
      { key: "name", label: "buffer", value: (row) => row.name, text: true },
      { key: "kind", label: "kind", value: (row) => row.kind, text: true },
      { key: "shape", label: "shape", value: (row) => row.shape, text: true },
      { key: "bytes", label: "size", value: (row) => row.bytes, show: (row, value) => bytes(value) },
      { key: "source", label: "source", value: (row) => row.source ?? "", text: true, show: (row, value) => h("span", { class: "source" }, value) },
    ], each.buffers)] : null);
}

/** One bar of parts, and their list, so that no colour says it alone. */
function bar(owners, whole) {
  const colour = (i) => `var(--series-${(i % 8) + 1})`;
  return [
    h("div", { class: "stack", role: "img", "aria-label": owners.map(([owner, size]) => `${owner} ${bytes(size)}`).join(", ") },
      owners.map(([, size], i) => h("i", { style: { width: `${(100 * size) / (whole || 1)}%`, background: colour(i) } }))),
    h("ul", { class: "legend" }, owners.map(([owner, size], i) => h("li", {}, h("i", { class: "key", style: { background: colour(i) } }), `${owner} ${bytes(size)}`))),
  ];
}

const WIDE = 640, HIGH = 300, LEFT = 64, BOTTOM = 36;

/** Classes of operations on log axes, FLOPs a byte across and FLOP/s up, under the device's ceilings. */
function roofline({ classes, bound }, { device, peak_flops: peak, bandwidth }) {
  const points = classes.filter((each) => each.flops > 0 && each.bytes > 0 && each.seconds > 0)
    .map((each) => ({ ...each, x: each.flops / each.bytes, y: each.flops / each.seconds }));
  const rows = grid("classes of operations on the roofline", [
    { key: "name", label: "class", value: (each) => each.name, text: true },
    { key: "seconds", label: "least time", value: (each) => each.seconds, show: (each, value) => seconds(value) },
    { key: "flops", label: "FLOPs", value: (each) => each.flops, show: (each, value) => si(value) },
    { key: "bytes", label: "bytes", value: (each) => each.bytes, show: (each, value) => bytes(value) },
    { key: "x", label: "FLOPs a byte", value: (each) => (each.bytes ? each.flops / each.bytes : null), show: (each, value) => number(value, 3) },
    { key: "bound", label: "bound by", value: (each) => each.bound, text: true },
  ], classes);
  const lead = h("p", { class: "soft" }, `${device}: ${si(peak, "FLOP/s")}, ${bytes(bandwidth)}/s; the program is bound by ${bound}.`);
  if (!points.length || !peak || !bandwidth) return [lead, rows];
  const ridge = peak / bandwidth;
  const xs = [...points.map((each) => each.x), ridge], ys = [...points.map((each) => each.y), peak];
  const [x0, x1] = [Math.min(...xs) / 3, Math.max(...xs) * 3], [y0, y1] = [Math.min(...ys) / 3, Math.max(...ys) * 2];
  const px = (x) => LEFT + ((WIDE - LEFT - 10) * Math.log(x / x0)) / Math.log(x1 / x0);
  const py = (y) => HIGH - BOTTOM - ((HIGH - BOTTOM - 10) * Math.log(y / y0)) / Math.log(y1 / y0);
  const decades = (low, high) => {
    const found = [];
    for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power++) found.push(10 ** power);
    return found;
  };
  const longest = Math.max(...points.map((each) => each.seconds));
  return [lead, h("div", { class: "scroll" }, s("svg", { class: "roofline", viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": "roofline: the table below has its figures" },
    decades(x0, x1).map((x) => [s("path", { class: "grid-line", d: `M${px(x)} 10V${HIGH - BOTTOM}` }), s("text", { x: px(x), y: HIGH - BOTTOM + 16, "text-anchor": "middle" }, number(x))]),
    decades(y0, y1).map((y) => [s("path", { class: "grid-line", d: `M${LEFT} ${py(y)}H${WIDE - 10}` }), s("text", { x: LEFT - 6, y: py(y) + 4, "text-anchor": "end" }, si(y))]),
    s("path", { class: "roof", d: `M${px(x0)} ${py(Math.max(y0, x0 * bandwidth))}L${px(ridge)} ${py(peak)}H${WIDE - 10}` }),
    points.map((each) => s("circle", { class: each.bound === "memory" ? "by-memory" : "by-compute", cx: px(each.x), cy: py(each.y), r: 4 + 12 * Math.sqrt(each.seconds / longest) },
      s("title", {}, `${each.name}: ${si(each.y, "FLOP/s")} at ${number(each.x, 3)} FLOPs a byte`))),
    s("text", { x: (WIDE + LEFT) / 2, y: HIGH - 4, "text-anchor": "middle" }, "FLOPs a byte"))), rows];
}
