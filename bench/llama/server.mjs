// Serves /v1/completions by llama.cpp, as a stream of greedy tokens: node server.mjs MODULES MODEL.gguf PORT THREADS SEATS
//
// Each seat is a sequence of one context, whose batches llama.cpp shares among all that are busy. A seat keeps what it
// computed last: a request takes the free seat whose tokens begin as its prompt does for longest. Seats share nothing.

import { createServer } from "node:http";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [modules, modelPath, port, threads, seats] = process.argv.slice(2);
const { getLlama } = await import(pathToFileURL(createRequire(`${modules}/`).resolve("node-llama-cpp")).href);
const SEAT_TOKENS = 4608; // the longest prompt of the benchmark and its answer

const llama = await getLlama({ gpu: false, build: "never", maxThreads: Number(threads) });
const model = await llama.loadModel({ modelPath });
const context = await model.createContext({
  sequences: Number(seats), contextSize: SEAT_TOKENS, batchSize: 2048, threads: Number(threads),
});
const free = Array.from({ length: Number(seats) }, () => context.getSequence());
const waiting = [];

function take(tokens) {
  let best = 0;
  let longest = -1;
  free.forEach((seat, at) => {
    const same = seat.compareContextTokens(tokens).firstDifferentIndex;
    if (same > longest || (same === longest && seat.nextTokenIndex < free[best].nextTokenIndex)) {
      [best, longest] = [at, same];
    }
  });
  return free.splice(best, 1)[0];
}

async function answer({ prompt, max_tokens: limit }, reply) {
  const tokens = model.tokenize(prompt);
  while (!free.length) await new Promise((resolve) => waiting.push(resolve));
  const seat = take(tokens);
  const send = (event) => reply.write(`data: ${JSON.stringify(event)}\n\n`);
  try {
    // The last token of a prompt is computed in any case: its logits are not kept.
    const same = Math.min(seat.compareContextTokens(tokens).firstDifferentIndex, tokens.length - 1);
    if (seat.nextTokenIndex > same) await seat.eraseContextTokenRanges([{ start: same, end: seat.nextTokenIndex }]);
    let made = 0;
    for await (const token of seat.evaluate(tokens.slice(same), { temperature: 0, yieldEogToken: true })) {
      made += 1;
      const last = made === limit;
      send({ choices: [{ index: 0, text: model.detokenize([token]), finish_reason: last ? "length" : null }] });
      if (last) break;
    }
    send({ choices: [], usage: { prompt_tokens: tokens.length, completion_tokens: made } });
    reply.end("data: [DONE]\n\n");
  } finally {
    free.push(seat);
    waiting.shift()?.();
  }
}

createServer(async (request, reply) => {
  if (request.url !== "/v1/completions") return reply.writeHead(request.url === "/health" ? 200 : 404).end();
  let body = "";
  for await (const piece of request) body += piece;
  reply.writeHead(200, { "content-type": "text/event-stream" });
  try {
    await answer(JSON.parse(body), reply);
  } catch (error) {
    reply.end(`data: ${JSON.stringify({ error: String(error), choices: [] })}\n\n`);
  }
}).listen(Number(port), "127.0.0.1");
