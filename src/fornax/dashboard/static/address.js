// What views read from the address: lists of runs, numbers, choices and expressions that may be wrong.

/** The address of a view as a link. */
export function href(view, values = {}) {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given).toString();
  return "#" + encodeURIComponent(view) + (query ? "?" + query : "");
}

/** Names as one value, and back: commas inside of names are escaped. */
export function joined(names) {
  return names.map((each) => each.replace(/[%,]/g, encodeURIComponent)).join(",");
}

export function list(text) {
  const parts = (text ?? "").split(",").filter(Boolean).map((each) => {
    try {
      return decodeURIComponent(each);
    } catch {
      return each;
    }
  });
  return [...new Set(parts)];
}

/** A number, or the fallback where there is none. */
export function numberOf(text, fallback = null) {
  const value = text === undefined || text === null || text.trim() === "" ? NaN : Number(text);
  return Number.isFinite(value) ? value : fallback;
}

/** One of the allowed values, or the first. */
export function oneOf(text, allowed) {
  return allowed.includes(text) ? text : allowed[0];
}

/** A range of x from "from" and "to", null unless both are there in order. */
export function rangeOf({ from, to }) {
  const [low, high] = [numberOf(from), numberOf(to)];
  return low !== null && high !== null && low < high ? [low, high] : null;
}

/** A regular expression, and what is wrong with it: a bad one matches as plain text. */
export function pattern(text) {
  if (!text) return { test: () => true, wrong: "" };
  try {
    const made = new RegExp(text, "i");
    return { test: (each) => made.test(each), wrong: "" };
  } catch (error) {
    const plain = text.toLowerCase();
    return { test: (each) => each.toLowerCase().includes(plain), wrong: `searched as plain text: ${error.message}` };
  }
}
