// Figures as text: three significant digits and a unit; a dash where nothing is known.

export const NONE = "—";

const TIME = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const SI = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const BINARY = [[2 ** 50, "PiB"], [2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

// A number with this many significant digits, without an exponent between 0.001 and a million.
export function number(value, digits = 4) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(Math.max(0, digits - 2));
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 9 });
}

// A time given in seconds.
export function seconds(value, digits = 3) {
  if (!known(value)) return NONE;
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size >= 120) return duration(value);
  const [unit, name] = TIME.find(([each]) => size >= each * 0.9995) ?? TIME.at(-1);
  return `${round(value / unit, digits)} ${name}`;
}

function duration(value) {
  const minutes = Math.floor(Math.abs(value) / 60);
  const sign = value < 0 ? "-" : "";
  if (minutes >= 60 * 24) return `${sign}${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
  if (minutes >= 60) return `${sign}${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${sign}${minutes} min ${Math.round(Math.abs(value) % 60)} s`;
}

// Bytes in powers of 1,024.
export function bytes(value, digits = 3) {
  if (!known(value)) return NONE;
  const [unit, name] = BINARY.find(([each]) => Math.abs(value) >= each) ?? [1, "B"];
  return `${round(value / unit, digits)} ${name}`;
}

// A quantity in powers of 1,000: si(2.1e12, "FLOP/s") is "2.1 TFLOP/s".
export function si(value, unit = "", digits = 3) {
  if (!known(value)) return NONE;
  const [size, prefix] = SI.find(([each]) => Math.abs(value) >= each * 0.9995) ?? [1, ""];
  return `${round(value / size, digits)} ${prefix}${unit}`.trim();
}

// A share of one.
export function percent(value, digits = 3) {
  if (!known(value)) return NONE;
  return value !== 0 && Math.abs(value) < 1e-4 ? "< 0.01 %" : `${round(value * 100, digits)} %`;
}

// A position in source with the last two parts of its path: "models/layers.py:88 (attend)".
export function source(text) {
  return text ? text.replace(/^\S*\/(?=[^/\s]+\/[^/\s]+:\d)/, "") : NONE;
}

// A whole number with separators.
export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : NONE;
}

// How many times: "1.8×".
export function times(value) {
  return known(value) ? `${round(value, 3)}×` : NONE;
}

// A moment given in seconds since 1970, in the reader's zone.
export function moment(value) {
  return known(value) ? new Date(value * 1000).toLocaleString("sv-SE") : NONE;
}

function round(value, digits) {
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  const decimals = size >= 1 ? Math.max(0, digits - Math.floor(Math.log10(size)) - 1) : digits;
  return Number(value.toFixed(Math.min(decimals, 6))).toLocaleString("en-US", { maximumFractionDigits: 6 });
}
