// Keeps the page current: the server sends the sections that it rendered, those that changed are replaced.
"use strict";

const link = document.querySelector("#link");
let last = 0;

function say(state, text) {
  link.className = state;
  link.querySelector("span").textContent = text;
}

function show(sections) {
  for (const [id, html] of Object.entries(sections)) {
    const place = document.getElementById(id);
    if (place && place.dataset.shown !== html) {
      const scrolled = place.querySelector(".scroll")?.scrollLeft ?? 0;
      place.innerHTML = html; // escaped by the server
      place.dataset.shown = html;
      const box = place.querySelector(".scroll");
      if (box) box.scrollLeft = scrolled;
    }
  }
}

const stream = new EventSource("/page/events");
stream.addEventListener("sections", (event) => {
  const { title, sections } = JSON.parse(event.data);
  last = Date.now();
  document.title = title;
  show(sections);
  say("live", "live");
});
stream.addEventListener("error", () => say("lost", "reconnecting"));

setInterval(() => {
  const silent = Math.round((Date.now() - last) / 1000);
  if (last && silent > 4) say("lost", `not live: last seen ${silent} s ago`);
}, 1000);

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copy);
  button.textContent = "Copied";
});
