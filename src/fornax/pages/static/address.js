// What the page shows, in the fragment of its address: "#view?key=value", so that a link or a reload shows it again.

// The view's name ("" when none) and its values.
export function read() {
  const [view, query] = location.hash.slice(1).split("?", 2);
  return { view: safe(view), values: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

function safe(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return ""; // a fragment that somebody broke
  }
}

// Go to a view: an entry of the browser's history, and `onChange` listeners are called.
export function go(view, values = {}) {
  location.hash = text(view, values);
}

// Keep values of the view that is shown, without an entry in the history; a value of null or "" is left out.
export function keep(values) {
  const now = read();
  history.replaceState(null, "", `#${text(now.view, { ...now.values, ...values })}`);
}

function text(view, values) {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given).toString();
  return encodeURIComponent(view) + (query ? `?${query}` : "");
}

// Call `listener` when the reader or `go` changes the address.
export function onChange(listener) {
  addEventListener("hashchange", listener);
}
