// The page's data, decoded: operations as objects, events of rows as typed arrays when first asked for.

export const data = JSON.parse(document.getElementById("data").textContent);

const columns = data.operations;

// Operations in the order of the capture, each with its position, measured seconds and runs.
export const operations = columns.name.map((_, index) => {
  const made = { index, seconds: 0, count: 0, share: 0 };
  for (const [field, values] of Object.entries(columns)) made[field] = values[index];
  return made;
});
for (const row of data.tables.op.rows) {
  for (const index of row.operations) {
    const { seconds, count, share, by_step: bySteps } = row;
    Object.assign(operations[index], { seconds, count, share, bySteps, timesBound: row.times_bound });
  }
}

// How an operation is called where programs could be confused.
export function programName(operation) {
  return data.programs[operation.program]?.name ?? "";
}

export const CAUSES = {
  compute: "series-1",
  exchange: "series-2",
  input: "series-6",
  host: "series-3",
  compile: "series-7",
  idle: "series-8",
};
export const OWNERS = {
  weights: "series-1",
  optimizer: "series-4",
  activations: "series-2",
  cache: "series-3",
  other: "series-8",
};
export const CLASSES = {
  matmul: "series-1",
  attention: "series-4",
  kernel: "series-6",
  elementwise: "series-3",
  reduce: "series-5",
  copy: "series-7",
  gather: "gather",
  exchange: "series-2",
  other: "series-8",
};

// What a bound says, in words.
export function boundText(operation, timesText) {
  const { bound, timesBound } = operation;
  if (!bound) return "bound not known";
  const what = bound === "compute" ? "arithmetic" : "memory bandwidth";
  if (timesBound === null || timesBound === undefined) return `bound by ${what}`;
  const faster = timesBound < 0.9 ? ": its data lay in a cache, or it moved less than the program says" : "";
  return `bound by ${what}, ${timesText(timesBound)} the roofline's time${faster}`;
}

// What the bounds of operations say of the device: bytes/s, and FLOP/s by dtype.
export function ceilings() {
  let bandwidth = null;
  const peaks = new Map();
  for (const each of operations) {
    if (!each.bound_seconds) continue;
    if (each.bound === "memory") bandwidth = Math.max(bandwidth ?? 0, each.bytes / each.bound_seconds);
    else peaks.set(each.dtype, Math.max(peaks.get(each.dtype) ?? 0, each.flops / each.bound_seconds));
  }
  return { bandwidth, peaks };
}

function bytesOf(text) {
  const raw = atob(text);
  const out = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at++) out[at] = raw.charCodeAt(at);
  return out;
}

// A column of `columns.py`: seven bits per byte, the lowest first. Differences carry their sign in the lowest bit.
function unpacked(text, count, Kind, differences) {
  const bytes = bytesOf(text);
  const out = new Kind(count);
  let at = 0;
  let before = 0;
  for (let index = 0; index < count; index++) {
    let value = 0;
    let scale = 1;
    for (;;) {
      const byte = bytes[at++];
      value += (byte & 127) * scale;
      if (byte < 128) break;
      scale *= 128;
    }
    if (differences) {
      before += value % 2 ? -(value + 1) / 2 : value / 2;
      value = before;
    }
    out[index] = value;
  }
  return out;
}

const decoded = new Map();

// Events of a row: {begin, duration, name, operation, step}; times in nanoseconds, -1 for none.
export function eventsOf(row) {
  if (!decoded.has(row)) {
    const operation = unpacked(row.operation, row.count, Int32Array, false);
    for (let at = 0; at < operation.length; at++) operation[at] -= 1;
    decoded.set(row, {
      begin: unpacked(row.begin, row.count, Float64Array, true),
      duration: unpacked(row.duration, row.count, Float64Array, false),
      name: unpacked(row.event, row.count, Int32Array, false),
      operation,
      step: unpacked(row.step, row.count, Int32Array, true),
    });
  }
  return decoded.get(row);
}

export function median(values) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
