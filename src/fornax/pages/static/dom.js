// Elements made in code: whatever is given as a child is text, never HTML.

const SVG = "http://www.w3.org/2000/svg";

// An element with attributes and children (nodes, text, nested lists; null and false are skipped).
// `on` holds listeners, `style` properties, `data` data attributes; an attribute of null or false is left out.
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

// The same for SVG.
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [property, each] of Object.entries(value)) element.style.setProperty(property, each);
    } else if (name === "data") {
      Object.assign(element.dataset, value);
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : document.createTextNode(child));
  }
}

// The element with other children.
export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

// A list of names and values, for cards and details: pairs whose value is null are left out.
export function pairs(entries) {
  const shown = entries.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "pairs" }, shown.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

// Whether a key was meant for a field that takes text.
export function typing(event) {
  return event.target instanceof Element && event.target.closest("input, select, textarea, [contenteditable]") !== null;
}

let card = null;

// A card near the pointer, at a position of the window; it is drawn over everything and holds no control.
export function showCard(x, y, ...children) {
  card ??= document.body.appendChild(h("div", { class: "card", "aria-hidden": "true" }));
  replace(card, ...children);
  card.hidden = false;
  const { width, height } = card.getBoundingClientRect();
  const left = x + 14 + width > innerWidth ? Math.max(4, x - 14 - width) : x + 14;
  const top = y + 14 + height > innerHeight ? Math.max(4, y - 14 - height) : y + 14;
  card.style.left = `${left}px`;
  card.style.top = `${top}px`;
}

export function hideCard() {
  if (card) card.hidden = true;
}
