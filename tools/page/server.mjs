// A henson server with models and runs to try the page with.

import { execFileSync, spawn } from "node:child_process";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../../", import.meta.url));

export const scratch = fs.mkdtempSync(path.join(os.tmpdir(), "henson-page-"));
process.on("exit", () => fs.rmSync(scratch, { recursive: true, force: true }));

/** all-MiniLM-L6-v2, and a small model for each head. */
export function defaultModels() {
  const minilm = execFileSync("cargo", ["xtask", "minilm"], { cwd: ROOT, encoding: "utf8" }).trim().split("\n").at(-1);
  const heads = { words: "mlm", sentiment: "sequence", ranker: "regression", entities: "token", reader: "qa", stories: "choice" };
  return [`minilm=${minilm}`, ...Object.entries(heads).map(([name, head]) => `${name}=${golden(name, head)}`)];
}

/** The golden weights of a head, with a vocabulary of its 71 pieces. */
function golden(name, head) {
  const directory = path.join(scratch, name);
  fs.mkdirSync(directory);
  for (const file of ["config.json", "model.safetensors"]) {
    fs.copyFileSync(path.join(ROOT, "tests-data/bert-golden", head, file), path.join(directory, file));
  }
  const letters = Array.from("abcdefghijklmnopqrstuvwxyz");
  const pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ...letters, ...letters.map((letter) => `##${letter}`), ".", ",", "?", "play", "jim"];
  while (pieces.length < 71) pieces.push(`word${pieces.length}`);
  fs.writeFileSync(path.join(directory, "vocab.txt"), `${pieces.join("\n")}\n`);
  return directory;
}

/** A run's log of so many steps, every tenth of them held out as well. */
export function writeRun(directory, name, steps, from = 1) {
  fs.mkdirSync(path.join(directory, name), { recursive: true });
  const lines = [];
  for (let step = from; step < from + steps; step++) {
    const loss = 2 + 6 * Math.exp(-step / 40) + 0.1 * Math.sin(step);
    lines.push({ kind: "train", step, phase: 0, loss, mlm_loss: loss, nsp_loss: null, learning_rate: 1e-4 * (1 - step / 1000), gradient_norm: 1, tokens_per_s: 9000, tokens: 512 * step, seconds: 3 * step });
    if (step % 10 === 0) {
      lines.push({ kind: "eval", step, metrics: { loss: loss - 0.2, perplexity: Math.exp(loss), accuracy: 1 - loss / 9 } });
      lines.push({ kind: "samples", step, texts: [{ text: "jim [MASK] the frog.", blanks: [[{ token: `word${step}`, probability: 0.25 }]] }] });
    }
  }
  fs.appendFileSync(path.join(directory, name, "metrics.jsonl"), lines.map((line) => `${JSON.stringify(line)}\n`).join(""));
}

/** Starts a server on a free port and waits until its models are loaded. */
export async function serve(models, ...flags) {
  const program = process.env.HENSON ?? path.join(ROOT, "target/debug/henson");
  const server = spawn(program, ["serve", "--json", "--port", "0", ...models.flatMap((model) => ["--model", model]), ...flags], { stdio: ["ignore", "pipe", "pipe"] });
  let said = "";
  server.stderr.on("data", (text) => (said += text));
  const line = await Promise.race([
    new Promise((resolve) => createInterface(server.stdout).once("line", resolve)),
    new Promise((_, reject) => server.once("exit", () => reject(new Error(`henson serve ended:\n${said}`)))),
  ]);
  const { address } = JSON.parse(line);
  for (;;) {
    if ((await fetch(`${address}/health`).catch(() => null))?.ok) break;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  const ended = new Promise((resolve) => server.once("exit", resolve));
  return { address, stop: () => { server.kill("SIGTERM"); return ended; } };
}
