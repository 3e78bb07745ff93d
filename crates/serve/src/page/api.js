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
  return { ...answer, milliseconds: performance.now() - begun, command: shell(path, text) };
}

/** The events of an answer that is written while it is read, until its `[DONE]`. */
export async function* stream(path, body, signal) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
  const response = await reach(path, options);
  if (!response.ok) throw new Problem(inWords(response, await response.json().catch(() => ({}))), response.status);
  let rest = "";
  for await (const text of pieces(response.body.pipeThrough(new TextDecoderStream()).getReader())) {
    const events = (rest + text).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const value = JSON.parse(data);
      if (value.error) throw new Problem(sentence(value.error.message ?? value.error));
      yield value;
    }
  }
  throw new Problem("The server ended the answer before it was complete.");
}

async function* pieces(reader) {
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

async function reach(path, options) {
  if (key) options.headers.Authorization = `Bearer ${key}`;
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer. Is it still running?");
  }
}

async function ask(path, options) {
  const response = await reach(path, options);
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
  // Routes under /v1 have OpenAI's form.
  const message = body.error?.message ?? body.error;
  const words = sentence(typeof message === "string" ? message : `status ${response.status}`);
  const later = response.headers.get("retry-after");
  return later ? `${words} Try again in ${later} s.` : words;
}

function sentence(message) {
  return message.charAt(0).toUpperCase() + message.slice(1) + (/[.!?]$/.test(message) ? "" : ".");
}

/** A request as somebody would type it; without a buffer where the answer comes bit by bit. */
export function shell(path, text, streamed = false) {
  const quoted = text.replaceAll("'", "'\\''");
  const authorization = key ? `  -H "Authorization: Bearer $HENSON_API_KEY" \\\n` : "";
  return `curl ${streamed ? "-N " : ""}${location.origin}${path} \\\n${authorization}  -H 'Content-Type: application/json' \\\n  -d '${quoted}'`;
}
