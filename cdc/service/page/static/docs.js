// Shows the description of the API, and adds the token of this tab to every request that a user tries out.
"use strict";

const TOKEN_KEY = "cdc-token"; // the same key as in page.js
const DESCRIPTION_PATH = "/api/v1/openapi.json";
const unlock = document.querySelector("#unlock");

function withToken(request) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  if (token && !request.headers.authorization) request.headers.authorization = `Bearer ${token}`;
  return request;
}

async function showDescription() {
  const response = await fetch(DESCRIPTION_PATH, withToken({ headers: {} }));
  unlock.hidden = response.status !== 401;
  if (!response.ok) return sessionStorage.removeItem(TOKEN_KEY);
  const description = await response.json();
  // without validatorUrl: null, Swagger UI sends the description to another site
  SwaggerUIBundle({ spec: description, dom_id: "#api", deepLinking: true, validatorUrl: null, requestInterceptor: withToken });
}

unlock.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN_KEY, unlock.querySelector("input").value.trim());
  unlock.querySelector("input").value = "";
  showDescription();
});
showDescription();
