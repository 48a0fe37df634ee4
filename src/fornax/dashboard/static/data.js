// The data under a run: what it is read from, how rows are packed, and how far the run has come.

import { h, pairs, replace } from "fornax/dom.js";
import { count, number } from "fornax/format.js";
import { href } from "dashboard/address.js";
import { grid, nothing, section } from "dashboard/parts.js";
import { get, partOf } from "dashboard/source.js";

/** The tab. */
export async function dataView(root, { id, signal, follow }) {
  const draw = async () => replace(root, parts(id, await get(partOf(id, "data"), signal)));
  await draw();
  follow(["checkpoints", "dataset.json"], draw);
}

function parts(id, data) {
  const figures = [
    ["rows seen", data.rows === null ? null : count(data.rows)], ["passes over the data", data.epoch === null ? null : number(data.epoch, 3)],
    ["tokens a row", data.seq_len === null ? null : count(data.seq_len)], ["rows a batch", data.batch_size === null ? null : count(data.batch_size)],
    ["packing", data.packing],
    ...Object.entries(data.dataset ?? {}).filter(([, value]) => typeof value !== "object").map(([name, value]) => [`${name} in the data`, typeof value === "number" ? count(value) : value]),
  ].filter(([, value]) => value !== null && value !== undefined);
  const found = [
    figures.length ? h("div", { class: "figures" }, figures.map(([label, value]) => h("div", { class: "figure" }, h("b", {}, value), h("span", {}, label)))) : null,
    data.names?.length ? h("p", {}, h("a", { href: href("run", { id, names: `^(${data.names.map((name) => name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})$` }) }, "Curves of the data's metrics")) : null,
    data.dataset && Array.isArray(data.dataset.parts) && data.dataset.parts.length ? section("Parts", rowsOf("parts of the data", data.dataset.parts)) : null,
    data.positions?.length ? section(`Position at step ${count(data.step)}`, h("p", { class: "lead" }, `${data.positions.length} virtual shards; a resumed run reads on from here.`),
      rowsOf("position of each virtual shard", data.positions.map((each) => flat(each)))) : null,
    data.config ? section("Config", pairs(Object.entries(flat(data.config)).map(([key, value]) => [key, String(value)]))) : null,
  ].filter(Boolean);
  return found.length ? found : nothing("This run says nothing of its data.");
}

function rowsOf(caption, rows) {
  const keys = [...new Set(rows.flatMap((row) => Object.keys(row)))].slice(0, 12);
  return grid(caption, keys.map((key) => ({ key, label: key, value: (row) => row[key] ?? null, text: rows.some((row) => typeof row[key] === "string"),
    show: (row, value) => (typeof value === "number" ? number(value) : value === null ? "" : String(value)) })), rows);
}

/** Nested values under dotted keys; lists are text. */
function flat(value, prefix = "") {
  const found = {};
  for (const [key, each] of Object.entries(value ?? {})) {
    if (each !== null && typeof each === "object" && !Array.isArray(each)) Object.assign(found, flat(each, `${prefix}${key}.`));
    else found[prefix + key] = Array.isArray(each) ? each.map((one) => (typeof one === "object" ? JSON.stringify(one) : one)).join(", ") : each;
  }
  return found;
}
