// Views as tabs: arrow keys, one panel, the address's fragment says which.

import { go, onChange, read } from "fornax/address.js";
import { h, hideCard, replace } from "fornax/dom.js";

// Tabs over `views` ({id, label, draw(panel, values)}), of which the first is shown when the address names none.
// `draw` fills the panel each time that its view is shown or the address changes, and may return a function that ends what it began.
export function tabs(views, label) {
  const list = h("div", { class: "tabs", role: "tablist", "aria-label": label });
  const panel = h("div", { role: "tabpanel", id: "panel", tabindex: "-1" });
  let end = null;
  const buttons = views.map((view) => {
    const button = h("button", { type: "button", role: "tab", id: `tab-${view.id}`, "aria-controls": "panel" }, view.label);
    button.addEventListener("click", () => go(view.id));
    list.append(button);
    return button;
  });
  list.addEventListener("keydown", (event) => {
    const at = buttons.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: views.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const next = (to + views.length) % views.length;
    buttons[next].focus();
    go(views[next].id);
  });

  function show() {
    const { view, values } = read();
    const at = Math.max(0, views.findIndex((each) => each.id === view));
    buttons.forEach((button, index) => {
      button.setAttribute("aria-selected", index === at);
      button.tabIndex = index === at ? 0 : -1;
    });
    buttons[at].scrollIntoView({ block: "nearest", inline: "nearest" });
    panel.setAttribute("aria-labelledby", `tab-${views[at].id}`);
    end?.();
    hideCard();
    replace(panel);
    end = views[at].draw(panel, values) ?? null;
  }

  onChange(show);
  return { elements: [list, panel], show };
}
