// Shows the description of the API, and sends the token of this tab with every request that is tried out.
"use strict";

const TOKEN = "cdc-token"; // as page.js has it
const DESCRIPTION = "/api/v1/openapi.json";
const unlock = document.querySelector("#unlock");

function authorized(request) {
  const token = sessionStorage.getItem(TOKEN);
  if (token && !request.headers.authorization) request.headers.authorization = `Bearer ${token}`;
  return request;
}

async function open() {
  const answer = await fetch(DESCRIPTION, authorized({ headers: {} }));
  unlock.hidden = answer.status !== 401;
  if (!answer.ok) return sessionStorage.removeItem(TOKEN);
  const description = await answer.json();
  // the default validator of Swagger UI is a site of its own
  SwaggerUIBundle({ spec: description, dom_id: "#api", deepLinking: true, validatorUrl: null, requestInterceptor: authorized });
}

unlock.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, unlock.querySelector("input").value.trim());
  unlock.querySelector("input").value = "";
  open();
});
open();
