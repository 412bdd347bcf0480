// The openai client for Node: a chat, a stream, a call of a tool, Responses, caching.
import assert from "node:assert";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const parameters = { type: "object", properties: { city: { enum: ["Paris"] } }, required: ["city"] };

const whole = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0 });
let text = "";
const stream = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0, stream: true });
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
assert.equal(text, whole.choices[0].message.content);
console.log("chats");

const tools = [{ type: "function", function: { name: "weather", parameters } }];
const called = await client.chat.completions.create({ model, messages, tools, tool_choice: "required", max_tokens: 100, temperature: 0 });
assert.deepEqual(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments), { city: "Paris" });
console.log("tools");

const response = await client.responses.create({ model, input: "Say a word.", max_output_tokens: 16 });
assert.ok(response.output_text);
console.log("responses");

const rules = "You are brief, and you say what you saw yourself. ".repeat(8);
const talk = { model, messages: [{ role: "system", content: rules }, ...messages], max_tokens: 4 };
const kept = { ...talk, prompt_cache_key: "a talk", prompt_cache_options: { ttl: "30m" } };
const written = (await client.chat.completions.create(kept)).usage.prompt_tokens_details;
assert.ok(written.cache_write_tokens > 0);
assert.deepEqual(written.cache_write_tokens_by_ttl, { "30m": written.cache_write_tokens });
const again = (await client.chat.completions.create(kept)).usage.prompt_tokens_details;
assert.ok(again.cached_tokens >= written.cache_write_tokens);
console.log("caching");
