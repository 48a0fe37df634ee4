// What `fornax quantize` wrote: its figures, each tensor's scheme and error, and what was kept.

import { pairs, replace } from "fornax/dom.js";
import { number } from "fornax/format.js";
import { table } from "fornax/table.js";
import { nothing, section } from "dashboard/parts.js";
import { get, partOf } from "dashboard/source.js";

/** The tab. */
export async function quantizationView(root, { id, signal, follow }) {
  const draw = async () => {
    const answer = await get(partOf(id, "quantization"), signal);
    if (!answer) {
      replace(root, nothing("Nothing is written yet."));
      return;
    }
    const plain = Object.entries(answer.report).filter(([, value]) => value === null || typeof value !== "object");
    const name = { key: "name", label: "tensor", value: (each) => each.name, text: true };
    replace(root, section("Report", pairs(plain.map(([key, value]) => [key, typeof value === "number" ? number(value) : String(value)]))),
      section("Tensors", table({ caption: "quantized tensors", rows: answer.tensors, key: (each) => each.name, sort: { key: "error", descending: true }, columns: [
        name, { key: "scheme", label: "scheme", value: (each) => each.scheme, text: true },
        { key: "error", label: "relative error", value: (each) => each.error, show: (each, value) => number(value) }] }).element),
      answer.kept.length ? section("Kept as they are", table({ caption: "tensors that were kept", rows: answer.kept, key: (each) => each.name,
        columns: [name, { key: "why", label: "why", value: (each) => each.why, text: true }] }).element) : null);
  };
  await draw();
  follow(["quantization"], draw);
}
