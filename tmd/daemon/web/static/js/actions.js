// Drain, undrain, pause, resume: each is confirmed, and sent with the token.

import { byId, el } from "./dom.js";

const TOKEN = "tmd-token";
const NOTICE_MS = 6000;

// The token lives as long as the tab, and no other origin can read it.
const token = () => sessionStorage.getItem(TOKEN) ?? "";

const WORK = {
  drain: (of) => ({
    title: `Drain ${of.host}?`, action: "Drain",
    text: "Its ranks move to standbys while training runs. It gets no rank until it is undrained.",
    options: [["leave", "Its workers exit afterwards"], ["soft", "It may take ranks again after a loss"]],
    body: (chosen) => ({ host: of.host, ...chosen, by: "page" }), done: `The drain of ${of.host} is requested.`,
  }),
  undrain: (of) => ({
    title: `Undrain ${of.host}?`, action: "Undrain", text: "Its workers may get ranks again.",
    body: () => ({ host: of.host }), done: `${of.host} is undrained.`,
  }),
  pause: () => ({
    title: "Pause new plans?", action: "Pause",
    text: "No plan is opened any more, also not after a loss, until somebody resumes. Plans under way go on.",
    body: () => ({}), done: "New plans are paused.",
  }),
  resume: () => ({
    title: "Resume?", action: "Resume", text: "New plans are opened again, and an open breaker is closed.",
    body: () => ({}), done: "New plans are opened again.",
  }),
};

let asked = null;

export function ask(verb, of = {}) {
  asked = { verb, ...WORK[verb](of) };
  open(asked.title, asked.text, asked.action, asked.options ?? [], !token());
}

export function askToken() {
  if (token()) {
    forget();
    say("The token is forgotten.");
    return;
  }
  asked = null;
  open("Unlock", "The token of [http] token_file. It is kept until this tab is closed.", "Unlock", [], true);
}

function open(title, text, action, options, wantsToken) {
  byId("ask-title").textContent = title;
  byId("ask-text").textContent = text;
  byId("ask-do").textContent = action;
  byId("ask-do").disabled = false;
  byId("ask-problem").textContent = "";
  byId("ask-options").replaceChildren(...options.map(([name, label]) => el("label", {},
    el("input", { type: "checkbox", name }), label)));
  byId("ask-token").hidden = !wantsToken;
  const dialog = byId("ask");
  if (!dialog.open) dialog.showModal();
  (wantsToken ? dialog.querySelector("[name=token]") : byId("ask-do")).focus();
}

function forget() {
  sessionStorage.removeItem(TOKEN);
  locked();
}

export function locked() {
  byId("lock").textContent = token() ? "Lock" : "Unlock";
}

function say(text) {
  byId("notice").textContent = text;
  setTimeout(() => { if (byId("notice").textContent === text) byId("notice").textContent = ""; }, NOTICE_MS);
}

async function submit(event) {
  event.preventDefault();
  const form = event.target, field = form.elements.token;
  if (field.value) sessionStorage.setItem(TOKEN, field.value.trim());
  field.value = "";
  locked();
  const work = asked;
  if (!work) {
    byId("ask").close();
    return;
  }
  byId("ask-do").disabled = true;
  const problem = await send(work.verb, work.body(chosen(form)));
  // Meanwhile the dialog may have been cancelled, and may ask about something else.
  if (asked !== work || !byId("ask").open) {
    say(problem ? `${work.title} ${problem}` : work.done);
    return;
  }
  byId("ask-do").disabled = false;
  byId("ask-problem").textContent = problem;
  if (problem) return;
  byId("ask").close();
  say(work.done);
}

const chosen = (form) => Object.fromEntries(
  [...form.querySelectorAll("[type=checkbox]")].map((box) => [box.name, box.checked]));

/** Why the daemon refused; empty if it did not. */
async function send(verb, body) {
  try {
    const answer = await fetch(`v1/${verb}`, {
      method: "POST", body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${token()}` },
    });
    if (answer.ok) return "";
    const { code, message } = (await answer.json()).error;
    if (code !== "wrong_token") return message;
    forget();
    byId("ask-token").hidden = false;
    byId("ask-token").querySelector("input").focus();
    return "The token is wrong: enter the one of [http] token_file.";
  } catch {
    return "The daemon does not answer: try again.";
  }
}

export function watchActions() {
  byId("ask").querySelector("form").addEventListener("submit", submit);
  locked();
}
