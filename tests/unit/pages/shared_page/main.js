// A page of every shared module, for the tests beside.

import { h } from "fornax/dom.js";
import { table } from "fornax/table.js";
import { chart } from "fornax/chart.js";
import { tabs } from "fornax/tabs.js";
import { themeSwitch } from "fornax/theme.js";
import { keep } from "fornax/address.js";
import * as format from "fornax/format.js";

const data = JSON.parse(document.getElementById("data").textContent);
const said = h("p", { id: "said" });
const numbers = (panel) => {
  const columns = [
    { key: "name", label: "Name", value: (row) => row.name, text: true },
    { key: "seconds", label: "Time", value: (row) => row.seconds, show: (row, value) => format.seconds(value) },
  ];
  const made = table({ caption: "rows", columns, rows: data.rows, key: (row) => row.name, sort: { key: "seconds", descending: true },
    choose: (row) => { said.textContent = row.name; }, changed: ({ filter }) => keep({ filter }) });
  panel.append(made.element);
};
const curves = (panel) => {
  const made = chart({ label: "two curves", xLabel: "step", data: data.curves, zoomed: (to) => { said.textContent = to ? "zoomed" : "whole"; } });
  panel.append(made.element);
  return made.destroy;
};
const texts = (panel) => panel.append(h("pre", { id: "texts" }, data.texts.map(([name, value]) => `${format[name](value)}\n`)));
const views = tabs([{ id: "rows", label: "Rows", draw: numbers }, { id: "curves", label: "Curves", draw: curves }, { id: "texts", label: "Texts", draw: texts }], "Views");
document.getElementById("page").append(themeSwitch(), ...views.elements, said);
views.show();
