// @openai/agents: a tool over Responses and over chats, whole and streamed, and a typed answer.
import assert from "node:assert";
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
setTracingDisabled(true);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
const asked = '<call name="weather">{"city": "Paris"}</call><say>It is sunny.</say>';

for (const [api, kind] of [["responses", OpenAIResponsesModel], ["chats", OpenAIChatCompletionsModel]]) {
  const cities = [];
  const weather = tool({
    name: "weather",
    description: "Tells the weather",
    parameters: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      cities.push(city);
      return "sunny";
    },
  });
  const given = { name: "Ann", instructions: "Be brief.", model: new kind(client, name) };
  const agent = new Agent({ ...given, tools: [weather] });
  assert.equal((await run(agent, asked)).finalOutput, "It is sunny.");
  const streamed = await run(agent, asked, { stream: true });
  for await (const event of streamed) assert(event.type);
  await streamed.completed;
  assert.equal(streamed.finalOutput, "It is sunny.");
  assert.deepEqual(cities, ["Paris", "Paris"]);
  const judge = new Agent({ ...given, outputType: z.object({ sunny: z.boolean() }) });
  assert.deepEqual((await run(judge, '<say>{"sunny": true}</say>')).finalOutput, { sunny: true });
  console.log(api);
}
