// Dark or light: the reader's scheme, or what the switch of this page says.

import { h } from "fornax/dom.js";

const KEY = "fornax-theme";
const NEXT = { "": "dark", dark: "light", light: "" };
const LABEL = { "": "Theme: system", dark: "Theme: dark", light: "Theme: light" };
const listeners = new Set();
let probe = null;

function stored() {
  try {
    return localStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // a browser that keeps nothing for files
  }
}

function apply(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  for (const listener of listeners) listener();
}

apply(stored() in NEXT ? stored() : "");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const listener of listeners) listener();
});

// The switch: a button that goes through system, dark and light.
export function themeSwitch() {
  const now = () => document.documentElement.dataset.theme ?? "";
  const button = h("button", { type: "button", title: "Change between dark and light" }, LABEL[now()]);
  button.addEventListener("click", () => {
    const theme = NEXT[now()];
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // kept for as long as the page is open
    }
    apply(theme);
    button.textContent = LABEL[theme];
  });
  return button;
}

// Call `listener` whenever colours change; returns what ends that.
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

// A colour of the theme ("ink", "series-1") as canvases take it.
export function colour(name) {
  probe ??= document.documentElement.appendChild(h("span", { hidden: true }));
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

// Series colours go round after the eighth.
export function seriesColour(index) {
  return colour(`series-${(index % 8) + 1}`);
}
