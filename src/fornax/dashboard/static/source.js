// Where the page's data comes from: the server's JSON and its event stream, or, in an exported
// file, the answers that the server put into it.

const embedded = document.getElementById("data");
const held = embedded ? JSON.parse(embedded.textContent) : null;

/** When this page was exported (Unix seconds); null of a live one. */
export const exported = held ? held.exported : null;

/** Why the server did not give what was asked for: its paragraph, for the reader. */
export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

let token = "";
let askToken = null;

/** Keep a token, in memory alone. `ask(why)` gives another, or null, where the server requires one. */
export function useToken(given, ask) {
  token = given;
  if (ask) askToken = ask;
}

/** The address of a part of a run. */
export function partOf(run, part = "", query = {}) {
  const path = "/api/runs/" + run.split("/").map(encodeURIComponent).join("/") + (part ? "/" + part : "");
  const given = new URLSearchParams(query).toString();
  return given ? `${path}?${given}` : path;
}

/** An address that the browser itself opens: a picture, a page of a run, an export. */
export function linkTo(path, query) {
  const pairs = Object.entries(query).flatMap(([name, value]) => [value].flat().map((each) => [name, each]));
  return path + "?" + new URLSearchParams([...pairs, ...(token ? [["token", token]] : [])]);
}

/** A JSON answer.
 *
 * Throws `Refused`: its status is 0 where the server does not answer. */
export async function get(path, signal) {
  if (held) {
    if (path in held.answers) return held.answers[path];
    throw new Refused(404, "This exported page does not hold it; open the runs with `fornax ui`.");
  }
  const response = await sent(path, { signal });
  if (response.status === 401 && askToken) {
    const given = await askToken("The server asks for its token.");
    if (given) {
      token = given;
      return get(path, signal);
    }
  }
  return told(response);
}

async function sent(path, options) {
  const headers = { accept: "application/json", ...options.headers, ...(token ? { authorization: "Bearer " + token } : {}) };
  try {
    return await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server does not answer; is `fornax ui` still running?");
  }
}

async function told(response) {
  if (response.ok) return response.json();
  const body = await response.json().catch(() => ({}));
  throw new Refused(response.status, body.error?.message ?? `The server answered ${response.status}.`);
}

/** Curves of one name: those of `/api/series`, in the order of the runs that have it. */
export async function series(runs, name, { x, points, range }, signal) {
  if (held) {
    const found = runs.map((run) => held.answers["/api/series?" + new URLSearchParams({ run, name, x })]?.series ?? []);
    return found.flat().map((each) => (range ? within(each, range) : each));
  }
  const query = new URLSearchParams([...runs.map((run) => ["run", run]), ["name", name], ["x", x], ["points", points],
    ...(range ? [["from", range[0]], ["to", range[1]]] : [])]);
  return (await get("/api/series?" + query, signal)).series;
}

function within(one, [from, to]) {
  const kept = [...one.x.keys()].filter((i) => one.x[i] >= from && one.x[i] <= to);
  const cut = (values) => values && kept.map((i) => values[i]);
  return { ...one, x: cut(one.x), y: cut(one.y), min: cut(one.min), max: cut(one.max) };
}

/** Ask a run for a profile, a checkpoint or a stop. */
export async function ask(run, request) {
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(request) };
  if (!token) token = (await askToken("Requests to a run need the token that `fornax ui --control` printed.")) ?? "";
  if (!token) return null;
  const response = await sent(partOf(run, "requests"), options);
  if (response.status === 401) token = "";
  return told(response);
}

/** Waits until the first chart has its points, so that the stream continues where they end; a second at most. */
export async function settled(offsets, signal) {
  for (let i = 0; i < 20 && !offsets() && !signal.aborted; i++) await new Promise((resolve) => setTimeout(resolve, 50));
}

/** Follow runs from their byte offsets, or with none the list: `handlers` by event. Returns what ends it.
 *
 * A lost connection comes back by itself where it broke. `state` receives "live" and "lost". */
export function follow(runs, offsets, handlers, state) {
  if (held) return () => {};
  let stream, again, ended = false, last = offsets?.length ? offsets.join(",") : "";
  const open = () => {
    stream = new EventSource(linkTo("/api/live", { run: runs, ...(last ? { after: last } : {}) }));
    stream.onopen = () => state("live");
    stream.onerror = () => {
      state("lost");
      if (stream.readyState === EventSource.CLOSED && !ended) again = setTimeout(open, 2000);
    };
    for (const [name, handler] of Object.entries(handlers)) {
      stream.addEventListener(name, (event) => {
        last = event.lastEventId || last;
        handler(JSON.parse(event.data));
      });
    }
  };
  open();
  return () => {
    ended = true;
    clearTimeout(again);
    stream.close();
  };
}
