// Keeps the page current: the server sends the sections that it rendered, and what changed in them is patched.
"use strict";

const TOKEN = "cdc-token"; // in the tab's own storage: an event stream of the browser's could not send it
const AGAIN = 1000; // milliseconds between two attempts to reach the server
const link = document.querySelector("#link");
const unlock = document.querySelector("#unlock");
let last = 0;

function say(state, text) {
  link.className = state;
  link.querySelector("span").textContent = text;
}

// Nodes stay where they are: a focus, a scrolled table and a click that has begun survive.
function patch(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  patchChildren(old, fresh);
}

function patchChildren(old, fresh) {
  const had = [...old.childNodes];
  const now = [...fresh.childNodes];
  now.forEach((node, place) => (place < had.length ? patch(had[place], node) : old.append(node)));
  had.slice(now.length).forEach((node) => node.remove());
}

function show(sections) {
  for (const [id, html] of Object.entries(sections)) {
    const place = document.getElementById(id);
    if (place && place.dataset.shown !== html) {
      const fresh = document.createElement("template");
      fresh.innerHTML = html; // escaped by the server
      patchChildren(place, fresh.content);
      place.dataset.shown = html;
    }
  }
}

function headers(more) {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { ...more, authorization: `Bearer ${token}` } : more;
}

function lock(why) {
  sessionStorage.removeItem(TOKEN);
  unlock.hidden = false;
  document.querySelector("main").hidden = true;
  unlock.querySelector("#unlock-notice").textContent = why;
  unlock.querySelector("input").focus();
  say("lost", "locked");
}

function take(event) {
  const said = event.split("\n").find((line) => line.startsWith("data: "));
  if (!said) return;
  const { title, sections } = JSON.parse(said.slice(6));
  last = Date.now();
  document.title = title;
  unlock.hidden = true;
  document.querySelector("main").hidden = false;
  show(sections);
  say("live", "live");
}

// Reads the stream until it ends; false when the server wants another token.
async function follow() {
  const answer = await fetch("/page/events", { headers: headers({ accept: "text/event-stream" }) });
  if (answer.status === 401) return false;
  if (!answer.ok) return true;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let waiting = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return true;
    const events = (waiting + value).split("\n\n");
    waiting = events.pop();
    events.forEach(take);
  }
}

async function stay() {
  for (;;) {
    let allowed = true;
    try {
      allowed = await follow();
    } catch {
      // the server is away
    }
    if (!allowed) return lock("The server does not take this token.");
    say("lost", "reconnecting");
    await new Promise((again) => setTimeout(again, AGAIN));
  }
}

if ("locked" in document.body.dataset && !sessionStorage.getItem(TOKEN)) lock("");
else stay();

unlock.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, unlock.querySelector("input").value.trim());
  unlock.querySelector("input").value = "";
  stay();
});

setInterval(() => {
  const silent = Math.round((Date.now() - last) / 1000);
  if (last && silent > 4) say("lost", `not live: last seen ${silent} s ago`);
}, 1000);

async function ask(button) {
  const notice = document.querySelector("#notice");
  if (button.dataset.sure && !confirm(button.dataset.sure)) return;
  button.disabled = true;
  notice.textContent = "";
  try {
    const more = { method: "POST", headers: headers({ "content-type": "application/json" }), body: "{}" };
    const answer = await fetch(button.dataset.verb, more);
    if (answer.ok) return;
    const { message, suggestion } = await answer.json();
    notice.textContent = `${message} → ${suggestion}`;
  } catch {
    notice.textContent = "The server is away: nothing was asked.";
  }
  button.disabled = false;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.verb) await ask(button);
  if (!button?.dataset.copy) return;
  await navigator.clipboard.writeText(button.dataset.copy);
  button.textContent = "Copied";
});
