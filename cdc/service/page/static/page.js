// Keeps the page up to date: the server sends rendered sections, and this script patches what changed in them.
"use strict";

const TOKEN_KEY = "cdc-token"; // key in the session storage of the tab
const RETRY_PAUSE = 1000; // milliseconds between two attempts to reach the server
const SILENT_AFTER = 4; // seconds without an event after which the page is not live
const link = document.querySelector("#link");
const unlock = document.querySelector("#unlock");
let lastEventAt = 0;

function showLinkState(state, text) {
  link.className = state;
  link.querySelector("span").textContent = text;
}

// Changes nodes in place, so that the focus, the scroll position and a click in progress survive.
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
  const oldNodes = [...old.childNodes];
  const freshNodes = [...fresh.childNodes];
  freshNodes.forEach((node, index) => (index < oldNodes.length ? patch(oldNodes[index], node) : old.append(node)));
  oldNodes.slice(freshNodes.length).forEach((node) => node.remove());
}

function showSections(sections) {
  for (const [id, html] of Object.entries(sections)) {
    const section = document.getElementById(id);
    if (section && section.dataset.shown !== html) {
      const fresh = document.createElement("template");
      fresh.innerHTML = html; // the server has escaped all values
      patchChildren(section, fresh.content);
      section.dataset.shown = html;
    }
  }
}

function withToken(headers) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  return token ? { ...headers, authorization: `Bearer ${token}` } : headers;
}

function askForToken(reason) {
  sessionStorage.removeItem(TOKEN_KEY);
  unlock.hidden = false;
  document.querySelector("main").hidden = true;
  unlock.querySelector("#unlock-notice").textContent = reason;
  unlock.querySelector("input").focus();
  showLinkState("lost", "locked");
}

function handleEvent(event) {
  const line = event.split("\n").find((line) => line.startsWith("data: "));
  if (!line) return;
  const { title, sections } = JSON.parse(line.slice("data: ".length));
  lastEventAt = Date.now();
  document.title = title;
  unlock.hidden = true;
  document.querySelector("main").hidden = false;
  showSections(sections);
  showLinkState("live", "live");
}

// Reads the event stream until it ends; returns false if the server refuses the token.
// This is fetch and not EventSource, which cannot send the token in a header.
async function readEvents() {
  const response = await fetch("/page/events", { headers: withToken({ accept: "text/event-stream" }) });
  if (response.status === 401) return false;
  if (!response.ok) return true;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let incomplete = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return true;
    const events = (incomplete + value).split("\n\n");
    incomplete = events.pop();
    events.forEach(handleEvent);
  }
}

async function readEventsForever() {
  for (;;) {
    let isAllowed = true;
    try {
      isAllowed = await readEvents();
    } catch {
      // the server does not answer: try again
    }
    if (!isAllowed) return askForToken("The server does not accept this token.");
    showLinkState("lost", "reconnecting");
    await new Promise((resolve) => setTimeout(resolve, RETRY_PAUSE));
  }
}

if ("locked" in document.body.dataset && !sessionStorage.getItem(TOKEN_KEY)) askForToken("");
else readEventsForever();

unlock.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN_KEY, unlock.querySelector("input").value.trim());
  unlock.querySelector("input").value = "";
  readEventsForever();
});

setInterval(() => {
  const silent = Math.round((Date.now() - lastEventAt) / 1000);
  if (lastEventAt && silent > SILENT_AFTER) showLinkState("lost", `not live: last update ${silent} s ago`);
}, 1000);

async function sendRequest(button) {
  const notice = document.querySelector("#notice");
  if (button.dataset.sure && !confirm(button.dataset.sure)) return;
  button.disabled = true;
  notice.textContent = "";
  try {
    const headers = withToken({ "content-type": "application/json" });
    const response = await fetch(button.dataset.verb, { method: "POST", headers, body: "{}" });
    if (response.ok) return;
    const { message, suggestion } = await response.json();
    notice.textContent = `${message} → ${suggestion}`;
  } catch {
    notice.textContent = "The server does not answer: try again.";
  }
  button.disabled = false;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.verb) await sendRequest(button);
  if (!button?.dataset.copy) return;
  await navigator.clipboard.writeText(button.dataset.copy);
  button.textContent = "Copied";
});
