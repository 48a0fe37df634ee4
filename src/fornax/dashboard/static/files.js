// What else lies in a run: events, checkpoints, pages, requests, files, the config.

import { h, replace } from "fornax/dom.js";
import { bytes, count, moment } from "fornax/format.js";
import { table } from "fornax/table.js";
import { ago, alertList, grid, nothing, section } from "dashboard/parts.js";
import { exported, get, linkTo, partOf } from "dashboard/source.js";

/** The tab of events: alerts, and what the launch and the run wrote down. */
export async function eventsView(root, { id, signal, run, follow }) {
  const host = h("div");
  replace(root, run.alerts.length ? section("Alerts", alertList(run.alerts)) : null, host);
  const draw = async () => {
    const { events, total } = await get(partOf(id, "events"), signal);
    const rows = [...events].reverse().map((event, i) => ({ i, time: event.time ?? null, text: said(event) }));
    replace(host, rows.length ? section("Events", total > events.length ? nothing(`The newest ${count(events.length)} of ${count(total)}.`) : null,
      table({ caption: "events", rows, key: (row) => row.i, columns: [
        { key: "time", label: "time", value: (row) => row.time, show: (row, value) => moment(value), text: true },
        { key: "text", label: "event", value: (row) => row.text, text: true }] }).element)
      : nothing("No events: only launched runs write them."));
  };
  await draw();
  follow(["events.jsonl"], draw);
}

function said(event) {
  return Object.entries(event).filter(([key]) => key !== "time").map(([key, value]) => `${key}: ${typeof value === "object" ? JSON.stringify(value) : value}`).join("  ");
}

/** The tab of files. */
export async function filesView(root, { id, run: first, signal, follow }) {
  const draw = (run) => replace(root,
    run.checkpoints.length ? section("Checkpoints", grid("checkpoints", [
      { key: "step", label: "step", value: (each) => each.step, show: (each, value) => count(value) },
      { key: "bytes", label: "size", value: (each) => each.bytes, show: (each, value) => bytes(value) },
      { key: "modified", label: "written", value: (each) => each.modified, show: (each) => moment(each.modified), text: true }], run.checkpoints)) : null,
    run.pages.length ? section("Pages", h("ul", {}, run.pages.map((name) => h("li", {}, page(id, name, name))))) : null,
    run.requests.length ? section("Requests", grid("requests to the run", [
      { key: "name", label: "request", value: (each) => each.name, text: true },
      { key: "kind", label: "kind", value: (each) => each.kind, text: true },
      { key: "done", label: "answer", value: (each) => (each.done ? result(each.result) : "waits for the run"), text: true }], run.requests)) : null,
    section("Files", table({ caption: "files of the run", rows: run.files, key: (each) => each.name, sort: { key: "modified", descending: true }, columns: [
      { key: "name", label: "file", value: (each) => each.name, text: true },
      { key: "bytes", label: "size", value: (each) => each.bytes, show: (each, value) => bytes(value) },
      { key: "modified", label: "changed", value: (each) => each.modified, show: (each, value) => ago(value) }] }).element));
  draw(first);
  follow(["checkpoints", "profile", "requests", "report.html"], async () => draw(await get(partOf(id), signal)));
}

function result(value) {
  return value === null || value === undefined ? "done" : typeof value === "object" ? JSON.stringify(value) : String(value);
}

function page(id, path, text) {
  return exported ? h("span", {}, text, " (not in this file)") : h("a", { href: linkTo("/files", { run: id, path }), target: "_blank", rel: "noopener" }, text);
}

/** The tab of the config: its text, as it was resolved. */
export function configView(root, { run }) {
  replace(root, section("config.yaml", h("pre", { tabindex: "0" }, run.config_text)));
}
