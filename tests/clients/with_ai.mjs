// The `ai` SDK: text, a stream, a call of a tool and an object, over chats and over Responses.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";

const [url, name] = process.argv.slice(2);
const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey: "any" });
const prompt = "What is the weather in Paris?";
const city = { type: "object", properties: { city: { type: "string", enum: ["Paris"] } }, required: ["city"], additionalProperties: false };

for (const [api, model] of [["chats", provider.chat(name)], ["responses", provider.responses(name)]]) {
  const whole = await generateText({ model, prompt, maxOutputTokens: 16, temperature: 0, maxRetries: 0 });
  let text = "";
  for await (const part of streamText({ model, prompt, maxOutputTokens: 16, temperature: 0 }).textStream) text += part;
  assert.equal(text, whole.text);
  const tools = { weather: tool({ description: "Tells the weather", inputSchema: jsonSchema(city) }) };
  const called = await generateText({ model, prompt, tools, toolChoice: "required", maxOutputTokens: 100, temperature: 0, maxRetries: 0 });
  assert.deepEqual(called.toolCalls[0].input, { city: "Paris" });
  const made = await generateObject({ model, prompt, schema: jsonSchema(city), maxOutputTokens: 100, temperature: 0, maxRetries: 0 });
  assert.deepEqual(made.object, { city: "Paris" });
  console.log(api);
}
