// LlamaIndex.TS: an agent with a tool, over chats.
import assert from "node:assert";
import { openai } from "@llamaindex/openai";
import { agent } from "@llamaindex/workflow";
import { tool } from "llamaindex";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const cities = [];
const weather = tool({
  name: "weather",
  description: "Tells the weather",
  parameters: z.object({ city: z.string() }),
  execute: ({ city }) => {
    cities.push(city);
    return "sunny";
  },
});
const llm = openai({ model: name, baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0, supportToolCall: true });
const ann = agent({ llm, tools: [weather], systemPrompt: "Be brief." });
const made = await ann.run('<call name="weather">{"city": "Paris"}</call><say>It is sunny.</say>');
assert.equal(made.data.result, "It is sunny.");
assert.deepEqual(cities, ["Paris"]);
console.log("chats");
