// What both pages use: their elements, the line of status, and the access token.
"use strict";

const byId = (id) => document.getElementById(id);

function make(tag, settings = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function say(text, refused = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("refused", refused);
}

function askForToken() {
  byId("key").hidden = false;
  byId("token").focus();
}

// A header holds no other characters: fetch would fail as if the server did not answer.
function storeToken() {
  const token = byId("token").value.trim();
  byId("token").value = "";
  if (!/^[\x21-\x7e]+$/.test(token)) {
    askForToken();
    say("a token is one word of ASCII characters; type it as the server has it", true);
    return false;
  }
  sessionStorage.setItem("token", token);
  byId("key").hidden = true;
  return true;
}

function headers(body) {
  const token = sessionStorage.getItem("token");
  return { ...(token && { Authorization: `Bearer ${token}` }), ...(body && { "Content-Type": "application/json" }) };
}
