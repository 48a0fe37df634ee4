// Requests to a running run: a profile, a checkpoint, a stop. Only where the server takes them.

import { h } from "fornax/dom.js";
import { announce, dialog } from "dashboard/parts.js";
import { ask } from "dashboard/source.js";

/** Ask the reader for the server's token; null when they have none. */
export function askForToken(why) {
  const input = h("input", { type: "password", autocomplete: "off", "aria-label": "Token", required: true });
  return dialog("Token", (close) => [
    h("form", { on: { submit: (event) => { event.preventDefault(); close(input.value.trim()); } } },
      h("h2", {}, "Token"), h("p", { class: "lead" }, why, " It is kept in this page's memory alone."),
      h("p", { class: "bar" }, input, h("button", { type: "submit" }, "Use it"),
        h("button", { type: "button", on: { click: () => close(null) } }, "Cancel"))),
  ]);
}

/** The buttons of a run. */
export function controls(id) {
  const steps = h("input", { type: "number", min: "1", max: "1000", value: "5", "aria-label": "Steps to profile" });
  const button = (text, make, sure) => h("button", { type: "button", on: { click: () => send(id, text, make, sure) } }, text);
  return h("div", { class: "bar", role: "group", "aria-label": "Ask the run" },
    button("Profile", () => ({ kind: "profile", steps: Number(steps.value) })), h("label", { class: "field" }, steps, h("span", {}, "steps")),
    button("Checkpoint", () => ({ kind: "checkpoint" })),
    button("Stop", () => ({ kind: "stop" }), "The run saves a checkpoint and ends. It can be resumed."));
}

async function send(id, text, make, sure) {
  const request = make();
  if (request.steps !== undefined && !(Number.isInteger(request.steps) && request.steps >= 1 && request.steps <= 1000)) {
    announce("Give the number of steps to profile, from 1 to 1000.");
    return;
  }
  if (sure && !(await confirmed(`${text} ${id}?`, sure, text))) return;
  try {
    const answer = await ask(id, request);
    if (answer) announce(`${text} asked: the run answers within a few seconds of its step.`);
  } catch (error) {
    announce(error.message);
  }
}

function confirmed(title, why, yes) {
  return dialog(title, (close) => [
    h("h2", {}, title), h("p", { class: "lead" }, why),
    h("p", { class: "bar" }, h("button", { type: "button", on: { click: () => close(true) } }, yes),
      h("button", { type: "button", autofocus: true, on: { click: () => close(null) } }, "Cancel")),
  ]);
}
