// Requests to this server: JSON there and back, with the key if one is needed, and failures in words.

const KEY = "henson-key";
let key = stored();

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function setKey(text) {
  key = text;
  try {
    sessionStorage.setItem(KEY, text);
  } catch {
    // Then it is kept as long as the page is.
  }
}

export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export async function get(path) {
  return (await ask(path, { headers: {} })).body;
}

/** The body of the answer, what it cost, and the request as somebody would type it. */
export async function post(path, body, signal) {
  const text = JSON.stringify(body);
  const begun = performance.now();
  const answer = await ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: text, signal });
  return { ...answer, milliseconds: performance.now() - begun, command: curl(path, text) };
}

async function ask(path, options) {
  if (key) options.headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer. Is it still running?");
  }
  let body;
  try {
    body = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(`The server sent something that is not JSON (status ${response.status}).`, response.status);
  }
  if (!response.ok) throw new Problem(inWords(response, body), response.status);
  const header = (name) => Number(response.headers.get(name) ?? 0);
  return { body, tokens: header("x-compute-tokens"), truncated: header("x-truncated-tokens") };
}

function inWords(response, body) {
  const message = typeof body.error === "string" ? body.error : `status ${response.status}`;
  const sentence = message.charAt(0).toUpperCase() + message.slice(1) + (/[.!?]$/.test(message) ? "" : ".");
  const later = response.headers.get("retry-after");
  return later ? `${sentence} Try again in ${later} s.` : sentence;
}

function curl(path, text) {
  const quoted = text.replaceAll("'", "'\\''");
  const authorization = key ? `  -H "Authorization: Bearer $HENSON_API_KEY" \\\n` : "";
  return `curl ${location.origin}${path} \\\n${authorization}  -H 'Content-Type: application/json' \\\n  -d '${quoted}'`;
}
