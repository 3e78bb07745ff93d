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

/** all-MiniLM-L6-v2, a small model for each head, and one that writes. */
export function defaultModels() {
  const minilm = execFileSync("cargo", ["xtask", "minilm"], { cwd: ROOT, encoding: "utf8" }).trim().split("\n").at(-1);
  const heads = { words: "mlm", sentiment: "sequence", ranker: "regression", entities: "token", reader: "qa", stories: "choice" };
  return [`minilm=${minilm}`, ...Object.entries(heads).map(([name, head]) => `${name}=${golden(name, head)}`), `writer=${writer("writer", 2048)}`];
}

/** A small GPT-2 of random weights, with a token for each byte: what it writes is noise. */
function writer(name, positions) {
  const directory = path.join(scratch, name);
  fs.mkdirSync(directory);
  const write = (file, value) => fs.writeFileSync(path.join(directory, file), JSON.stringify(value));
  const [width, end] = [32, 256];
  const plain = (byte) => (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
  let other = 0x100;
  const symbols = Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(plain(byte) ? byte : other++));
  const level = { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: true };
  write("tokenizer.json", {
    version: "1.0", truncation: null, padding: null, normalizer: null, pre_tokenizer: level, post_processor: level, decoder: level,
    added_tokens: [{ id: end, content: "<|endoftext|>", single_word: false, lstrip: false, rstrip: false, normalized: false, special: true }],
    model: { type: "BPE", dropout: null, unk_token: null, continuing_subword_prefix: "", end_of_word_suffix: "", fuse_unk: false, byte_fallback: false,
      vocab: Object.fromEntries([...symbols, "<|endoftext|>"].map((symbol, id) => [symbol, id])), merges: [] },
  });
  write("config.json", { architectures: ["GPT2LMHeadModel"], model_type: "gpt2", activation_function: "gelu_new", bos_token_id: end, eos_token_id: end,
    layer_norm_epsilon: 1e-5, n_embd: width, n_head: 2, n_inner: null, n_layer: 2, n_positions: positions, vocab_size: end + 1, tie_word_embeddings: true });
  const shapes = { "wte.weight": [end + 1, width], "wpe.weight": [positions, width], "ln_f.weight": [width], "ln_f.bias": [width] };
  for (const layer of [0, 1]) {
    const [h, wide] = [`h.${layer}`, 4 * width];
    for (const norm of ["ln_1", "ln_2"]) Object.assign(shapes, { [`${h}.${norm}.weight`]: [width], [`${h}.${norm}.bias`]: [width] });
    for (const [matrix, rows, columns] of [["attn.c_attn", width, 3 * width], ["attn.c_proj", width, width], ["mlp.c_fc", width, wide], ["mlp.c_proj", wide, width]]) {
      Object.assign(shapes, { [`${h}.${matrix}.weight`]: [rows, columns], [`${h}.${matrix}.bias`]: [columns] });
    }
  }
  let [state, offset] = [1, 0];
  // Park and Miller's generator: the same noise each time.
  const noise = () => (state = (state * 48271) % 2147483647) / 2147483647 - 0.5;
  const [header, parts] = [{}, []];
  for (const [key, shape] of Object.entries(shapes)) {
    const numbers = Float32Array.from({ length: shape.reduce((a, b) => a * b) }, () => (/ln_.*weight/.test(key) ? 1 : noise()));
    header[`transformer.${key}`] = { dtype: "F32", shape, data_offsets: [offset, (offset += numbers.byteLength)] };
    parts.push(Buffer.from(numbers.buffer));
  }
  const json = Buffer.from(JSON.stringify(header));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(json.length));
  fs.writeFileSync(path.join(directory, "model.safetensors"), Buffer.concat([length, json, ...parts]));
  return directory;
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
