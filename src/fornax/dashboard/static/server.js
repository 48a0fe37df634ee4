// A server over time: its requests, its cache, how full its batches are.

import { h, replace } from "fornax/dom.js";
import { chart } from "fornax/chart.js";
import { number } from "fornax/format.js";
import { grid, nothing, section } from "dashboard/parts.js";
import { get, partOf } from "dashboard/source.js";

/** The tab. */
export async function serverView(root, { id, signal, end, follow }) {
  const figures = h("div", { class: "figures" }), charts = h("div", { class: "curves" }), models = h("div");
  const drawn = new Map();
  const draw = async () => {
    const answer = await get(partOf(id, "server"), signal);
    const names = answer.names.filter((name) => answer.columns[name]?.some((value) => typeof value === "number"));
    replace(figures, names.slice(0, 8).map((name) => h("div", { class: "figure" }, h("b", {}, number(answer.last?.[name] ?? null)), h("span", {}, label(name)))));
    for (const name of names) {
      const data = { x: answer.time, series: [{ label: label(name), y: answer.columns[name], colour: "series-1" }] };
      if (drawn.has(name)) {
        drawn.get(name).set(data);
        continue;
      }
      const made = chart({ label: `${label(name)} over time, last ${number(answer.last?.[name] ?? null)}`, height: 200, data, xTime: true, xLabel: "time", sync: "server", fromZero: true });
      drawn.set(name, made);
      charts.append(h("figure", { class: "panel" }, h("figcaption", {}, h("b", {}, label(name))), made.element));
    }
    const rows = Object.entries(answer.models ?? {});
    replace(models, names.length ? null : nothing("The server has written nothing yet."), rows.length ? section("Models", grid("models of the server", [
      { key: "model", label: "model", value: ([model]) => model, text: true },
      ...[...new Set(rows.flatMap(([, values]) => Object.keys(values ?? {})))].map((key) => ({ key, label: label(key), value: ([, values]) => values?.[key] ?? null,
        show: (row, value) => (typeof value === "number" ? number(value) : String(value ?? "")) })),
    ], rows)) : null);
  };
  replace(root, figures, charts, models);
  end(() => { for (const each of drawn.values()) each.destroy(); });
  await draw();
  follow(["server.jsonl"], draw);
}

function label(name) {
  return name.replaceAll("_", " ");
}
