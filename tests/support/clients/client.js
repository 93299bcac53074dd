// A client of the gRPC listener in Node: it asks all that a program would, and ends with an error at
// the first answer that is not right.
//
//     node client.js FOLDER_OF_PROTOS TARGET [CERTIFICATE_THAT_IS_TRUSTED]

"use strict";

const assert = require("assert");
const fs = require("fs");
const path = require("path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const CALLS = 200;
const TOGETHER = 16;
const STREAMED = 300;
const LARGE = 600 * 1024;
const LARGEST = 5 << 20;

const [folder, target, root] = process.argv.slice(2);
const credentials = root
  ? grpc.credentials.createSsl(fs.readFileSync(root))
  : grpc.credentials.createInsecure();

function load(file) {
  return grpc.loadPackageDefinition(loader.loadSync(path.join(folder, file), { keepCase: true, longs: Number }));
}

function connect(Service, options = {}) {
  return new Service(target, credentials, {
    "grpc.max_receive_message_length": -1,
    "grpc.max_send_message_length": -1,
    "grpc.use_local_subchannel_pool": 1,
    "grpc.ssl_target_name_override": "localhost",
    "grpc.default_authority": "localhost",
    ...options,
  });
}

const Inference = load("grpc_service.proto").inference.GRPCInferenceService;
const Health = load("health.proto").grpc.health.v1.Health;

// --- requests

const numbers = Array.from({ length: 16 }, (_, at) => at);

function bytes(values) {
  return Buffer.from(Int32Array.from(values).buffer);
}

function sum(id) {
  const tensor = (name) => ({ name, datatype: "INT32", shape: [1, 16] });
  return {
    model_name: "simple",
    id,
    inputs: [tensor("INPUT0"), tensor("INPUT1")],
    raw_input_contents: [bytes(numbers), bytes(numbers.map(() => 3))],
  };
}

function checkSum(response, id) {
  assert.strictEqual(response.id, id);
  assert(response.raw_output_contents[0].equals(bytes(numbers.map((value) => value + 3))));
  assert(response.raw_output_contents[1].equals(bytes(numbers.map((value) => value - 3))));
}

function echo(data) {
  return {
    model_name: "identity",
    inputs: [{ name: "INPUT0", datatype: "FP32", shape: [data.length / 4] }],
    raw_input_contents: [data],
  };
}

const GATED = {
  model_name: "gated",
  inputs: [{ name: "INPUT0", datatype: "INT32", shape: [1, 1] }],
  raw_input_contents: [bytes([0])],
};

// --- calls

function ask(client, method, request, options = {}) {
  const metadata = new grpc.Metadata();
  metadata.set("some-bin", Buffer.from([0, 255, 128]));
  metadata.set("some", "words");
  return new Promise((resolve, reject) => {
    client[method](request, metadata, options, (error, response) =>
      error ? reject(error) : resolve(response),
    );
  });
}

async function failure(asked, code) {
  const error = await asked.then(
    () => assert.fail("answered"),
    (failed) => failed,
  );
  assert.strictEqual(error.code, code, error);
  return error.details;
}

function soon(milliseconds) {
  return { deadline: Date.now() + milliseconds };
}

async function checkAdmin(client) {
  assert((await ask(client, "ServerLive", {})).live);
  const described = await ask(client, "ModelMetadata", { name: "simple" });
  assert.strictEqual(described.name, "simple");
  assert.strictEqual(described.inputs.length, 2);
  const said = await failure(ask(client, "ModelMetadata", { name: "模型" }), grpc.status.NOT_FOUND);
  assert.strictEqual(said, "Request for unknown model: '模型' is not found");
}

async function checkInfer(client) {
  for (let first = 0; first < CALLS; first += TOGETHER) {
    const asked = Array.from({ length: TOGETHER }, async (_, at) => {
      const id = `${first + at}`;
      const options = at % 2 ? {} : soon(3600 * 1000);
      checkSum(await ask(client, "ModelInfer", sum(id), options), id);
    });
    await Promise.all(asked);
  }
}

async function checkSizes(client) {
  for (const size of [LARGE, LARGEST]) {
    const data = Buffer.alloc(size, "many the same");
    const response = await ask(client, "ModelInfer", echo(data));
    assert(response.raw_output_contents[0].equals(data));
  }
}

async function checkStream(client) {
  const call = client.ModelStreamInfer();
  for (let number = 0; number < STREAMED; number += 1) call.write(sum(`${number}`));
  call.end();
  let number = 0;
  for await (const message of call) {
    checkSum(message.infer_response, `${number}`);
    number += 1;
  }
  assert.strictEqual(number, STREAMED);
}

// Calls that end before their answer: one is executed, the other waits behind it.
async function checkEnds(client) {
  await failure(ask(client, "ModelInfer", GATED, soon(300)), grpc.status.DEADLINE_EXCEEDED);
  const cancelled = new Promise((resolve) => {
    const call = client.ModelInfer(GATED, (error) => resolve(error.code));
    setTimeout(() => call.cancel(), 100);
  });
  assert.strictEqual(await cancelled, grpc.status.CANCELLED);

  const call = client.ModelStreamInfer();
  call.write(sum("x"));
  const code = await new Promise((resolve) => {
    call.on("data", (message) => {
      checkSum(message.infer_response, "x");
      call.cancel();
    });
    call.on("error", (error) => resolve(error.code));
  });
  assert.strictEqual(code, grpc.status.CANCELLED);
}

async function checkHealth() {
  const client = connect(Health);
  assert.strictEqual((await ask(client, "Check", {})).status, 1);
  const watch = client.Watch({ service: "" });
  const code = await new Promise((resolve) => {
    watch.on("data", (message) => {
      assert.strictEqual(message.status, 1);
      watch.cancel();
    });
    watch.on("error", (error) => resolve(error.code));
  });
  assert.strictEqual(code, grpc.status.CANCELLED);
  client.close();
}

async function checkReflection() {
  const { v1 } = load("reflection.proto").grpc.reflection;
  for (const version of ["v1", "v1alpha"]) {
    const definition = { ...v1.ServerReflection.service };
    for (const [name, method] of Object.entries(definition)) {
      definition[name] = { ...method, path: method.path.replace(".v1.", `.${version}.`) };
    }
    const client = connect(grpc.makeGenericClientConstructor(definition, "ServerReflection"));
    const call = client.ServerReflectionInfo();
    call.write({ list_services: "" });
    call.end();
    const names = [];
    for await (const answer of call) {
      names.push(...answer.list_services_response.service.map((each) => each.name));
    }
    assert(names.includes("inference.GRPCInferenceService"), names);
    client.close();
  }
}

async function main() {
  const client = connect(Inference);
  await checkAdmin(client);
  await checkInfer(client);
  await checkSizes(client);
  const compressing = connect(Inference, {
    "grpc.default_compression_algorithm": grpc.compressionAlgorithms.gzip,
  });
  await checkSizes(compressing);
  compressing.close();
  await checkStream(client);
  await checkEnds(client);
  client.close();
  await checkHealth();
  await checkReflection();
  console.log("all is right");
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
