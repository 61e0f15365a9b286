//! The routes that answer, framed as vLLM frames them.

use std::io;
use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{Fault, MODEL, Shared, error, sim};

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Chat,
    Text,
}

pub async fn chat_completions(State(shared): State<Arc<Shared>>, body: Bytes) -> Response {
    respond(shared, body, Kind::Chat).await
}

pub async fn completions(State(shared): State<Arc<Shared>>, body: Bytes) -> Response {
    respond(shared, body, Kind::Text).await
}

pub async fn tokenize(State(shared): State<Arc<Shared>>, Json(body): Json<Value>) -> Json<Value> {
    let text = match body.get("messages") {
        Some(messages) => sim::render_chat(messages),
        None => body["prompt"].as_str().unwrap_or_default().to_owned(),
    };
    let tokens = sim::encode(&text);
    let max_model_len = shared.inner.lock().max_model_len;
    Json(json!({"count": tokens.len(), "max_model_len": max_model_len, "tokens": tokens}))
}

/// Counts an answer as cancelled unless it was disarmed.
struct Active {
    shared: Arc<Shared>,
    finished: bool,
}

impl Drop for Active {
    fn drop(&mut self) {
        let mut inner = self.shared.inner.lock();
        inner.active -= 1;
        if self.finished {
            inner.counters.requests_finished += 1;
        } else {
            inner.cancelled += 1;
        }
    }
}

/// A parsed request with its whole answer.
struct Job {
    kind: Kind,
    request: Value,
    prompt: Vec<u32>,
    output: Vec<u32>,
    finish_reason: &'static str,
    id: String,
    fault: Option<Fault>,
}

impl Job {
    fn flag(&self, name: &str) -> bool {
        self.request[name].as_bool().unwrap_or(false)
    }

    fn usage(&self) -> Value {
        let (prompt, output) = (self.prompt.len(), self.output.len());
        json!({"prompt_tokens": prompt, "total_tokens": prompt + output,
            "completion_tokens": output})
    }

    fn top_k(&self) -> Option<usize> {
        let on = self.request["logprobs"].as_bool().unwrap_or(false);
        match self.kind {
            Kind::Chat if on => Some(self.request["top_logprobs"].as_u64().unwrap_or(0) as usize),
            Kind::Chat => None,
            Kind::Text => self.request["logprobs"].as_u64().map(|k| k as usize),
        }
    }

    fn logprobs(&self, ids: &[u32]) -> Value {
        let Some(k) = self.top_k() else { return Value::Null };
        let as_ids = self.flag("return_tokens_as_token_ids");
        let row = |id: u32| sim::top_logprobs(id, k.max(1));
        let entry = |(id, logprob): &(u32, f64)| {
            let token = sim::spell(*id, as_ids);
            json!({"token": token, "logprob": logprob, "bytes": sim::bytes(&[*id])})
        };
        match self.kind {
            Kind::Chat => {
                let content: Vec<Value> = ids
                    .iter()
                    .map(|id| {
                        let row = row(*id);
                        let mut own = entry(&row[0]);
                        own["top_logprobs"] = row[..k.min(row.len())].iter().map(entry).collect();
                        own
                    })
                    .collect();
                json!({"content": content})
            }
            Kind::Text => json!({
                "text_offset": vec![0; ids.len()],
                "tokens": ids.iter().map(|id| sim::spell(*id, as_ids)).collect::<Vec<_>>(),
                "token_logprobs": ids.iter().map(|id| row(*id)[0].1).collect::<Vec<_>>(),
                "top_logprobs": ids.iter().map(|id| {
                    row(*id).iter().map(|(id, logprob)| (sim::spell(*id, as_ids), json!(logprob)))
                        .collect::<serde_json::Map<_, _>>()
                }).collect::<Vec<_>>(),
            }),
        }
    }

    fn head(&self) -> Value {
        let object = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Text => "text_completion",
        };
        json!({"id": self.id, "object": object, "created": 1_700_000_000,
            "model": self.request["model"]})
    }

    fn prompt_logprobs(&self) -> Value {
        let Some(k) = self.request["prompt_logprobs"].as_u64() else { return Value::Null };
        let row = |id: &u32| {
            sim::top_logprobs(*id, k as usize)
                .iter()
                .enumerate()
                .map(|(n, (id, logprob))| {
                    let text = sim::spell(*id, false);
                    let entry = json!({"logprob": logprob, "rank": n + 1, "decoded_token": text});
                    (id.to_string(), entry)
                })
                .collect::<serde_json::Map<_, _>>()
                .into()
        };
        std::iter::once(Value::Null).chain(self.prompt[1..].iter().map(row)).collect()
    }

    /// The answer as one JSON document.
    fn whole(&self) -> Value {
        let mut body = self.head();
        let text = String::from_utf8_lossy(&sim::bytes(&self.output)).into_owned();
        let mut choice = json!({"index": 0, "logprobs": self.logprobs(&self.output),
            "finish_reason": self.finish_reason, "stop_reason": null});
        match self.kind {
            Kind::Chat => choice["message"] = json!({"role": "assistant", "content": text}),
            Kind::Text => {
                choice["text"] = text.into();
                choice["prompt_logprobs"] = self.prompt_logprobs();
            }
        }
        if self.flag("return_token_ids") {
            choice["token_ids"] = json!(self.output);
            match self.kind {
                Kind::Chat => body["prompt_token_ids"] = json!(self.prompt),
                Kind::Text => choice["prompt_token_ids"] = json!(self.prompt),
            }
        }
        body["choices"] = json!([choice]);
        body["usage"] = self.usage();
        body
    }
}

fn parse(shared: &Shared, body: &[u8], kind: Kind) -> Result<Job, Box<Response>> {
    let refuse = |status, message: &str| Err(Box::new(error(status, message)));
    let Ok(request) = serde_json::from_slice::<Value>(body) else {
        return refuse(400, "Invalid JSON");
    };
    let mut inner = shared.inner.lock();
    let fault = inner.faults.pop_front();
    if let Some(Fault::Status { status, message }) = &fault {
        return refuse(*status, message);
    }
    let known = [MODEL, "an-adapter"];
    if !known.contains(&request["model"].as_str().unwrap_or_default()) {
        return refuse(404, "The model does not exist.");
    }
    for name in ["prompt_logprobs", "top_logprobs", "logprobs"] {
        let asked = request[name].as_u64().unwrap_or(0);
        if asked > inner.max_logprobs as u64 {
            let limit = inner.max_logprobs;
            let what = if name == "prompt_logprobs" { "prompt" } else { "sample" };
            return refuse(
                400,
                &format!(
                    "Requested {what} logprobs of {asked}, which is greater than max allowed: {limit}"
                ),
            );
        }
    }
    let prompt = match kind {
        Kind::Chat => sim::encode(&sim::render_chat(&request["messages"])),
        Kind::Text => match &request["prompt"] {
            Value::String(text) => sim::encode(text),
            Value::Array(ids) => ids.iter().filter_map(Value::as_u64).map(|id| id as u32).collect(),
            _ => return refuse(400, "prompt is required"),
        },
    };
    if prompt.is_empty() || prompt.len() >= inner.max_model_len {
        let limit = inner.max_model_len;
        return refuse(400, &format!("This model's maximum context length is {limit} tokens."));
    }
    let max_tokens =
        request["max_completion_tokens"].as_u64().or(request["max_tokens"].as_u64()).unwrap_or(256)
            as usize;
    let mut output = sim::answer(&prompt);
    let finish_reason = if output.len() > max_tokens { "length" } else { "stop" };
    output.truncate(max_tokens);
    inner.counters.prompt_tokens += prompt.len() as u64;
    inner.active += 1;
    let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
    let id = format!("{prefix}-{:08}", inner.next_id());
    Ok(Job { kind, request, prompt, output, finish_reason, id, fault })
}

async fn respond(shared: Arc<Shared>, body: Bytes, kind: Kind) -> Response {
    let job = match parse(&shared, &body, kind) {
        Ok(job) => job,
        Err(refused) => return *refused,
    };
    let mut active = Active { shared: shared.clone(), finished: false };
    if let Some(Fault::SlowFirstToken(wait)) = job.fault {
        tokio::time::sleep(wait).await;
    }
    if !job.flag("stream") {
        let mut done = 0;
        while done < job.output.len() {
            done = step(&shared, done, job.output.len()).await;
        }
        let mut body = job.whole();
        if let Some(spoil) = shared.inner.lock().spoil_logprobs {
            spoil(&mut body);
        }
        active.finished = true;
        return Json(body).into_response();
    }
    let (events, receiver) = mpsc::channel::<io::Result<Bytes>>(1);
    // Ends by itself: when the receiver is dropped with the response body, sending fails.
    tokio::spawn(async move {
        // All of it moves here, not just the flag that is assigned below.
        let mut active = active;
        let sent = stream(&shared, &job, &events).await;
        active.finished = sent.is_ok();
    });
    let stream = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let body = Body::from_stream(stream);
    ([("content-type", "text/event-stream; charset=utf-8")], body).into_response()
}

/// Waits for leave to go on, takes one verification step; returns the tokens done after it.
async fn step(shared: &Shared, done: usize, total: usize) -> usize {
    let delay = shared.inner.lock().token_delay;
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
    let mut hold = shared.hold.subscribe();
    let _ = hold.wait_for(|allowed| done < *allowed).await;
    let mut inner = shared.inner.lock();
    let accepted = inner.step();
    let after = (done + accepted + 1).min(total);
    inner.counters.generation_tokens += (after - done) as u64;
    after
}

/// Sends the answer as server-sent events; fails when the client is gone or a fault says so.
async fn stream(
    shared: &Shared,
    job: &Job,
    events: &mpsc::Sender<io::Result<Bytes>>,
) -> Result<(), ()> {
    let reset_after = match job.fault {
        Some(Fault::ResetMidStream { after_events }) => after_events,
        _ => usize::MAX,
    };
    let mut sent = 0;
    let mut send = async |payload: String| {
        if sent == reset_after {
            let _ = events.send(Err(io::Error::other("reset on demand"))).await;
            return Err(());
        }
        sent += 1;
        events.send(Ok(Bytes::from(format!("data: {payload}\n\n")))).await.map_err(|_| ())
    };
    let mut head = job.head();
    if job.kind == Kind::Chat {
        head["object"] = "chat.completion.chunk".into();
        let mut first = head.clone();
        first["choices"] = json!([{"index": 0, "delta": {"role": "assistant", "content": ""},
            "logprobs": null, "finish_reason": null}]);
        if job.flag("return_token_ids") {
            first["prompt_token_ids"] = json!(job.prompt);
        }
        send(first.to_string()).await?;
    }
    let (mut done, mut pending) = (0, Vec::new());
    while done < job.output.len() {
        let after = tokio::select! {
            after = step(shared, done, job.output.len()) => after,
            () = events.closed() => return Err(()),
        };
        let ids = &job.output[done..after];
        pending.extend(sim::bytes(ids));
        let last = after == job.output.len();
        // A character that is not complete yet is held back, as a detokenizer does.
        let valid = match std::str::from_utf8(&pending) {
            Err(e) if !last => e.valid_up_to(),
            _ => pending.len(),
        };
        let text =
            String::from_utf8_lossy(&pending.drain(..valid).collect::<Vec<_>>()).into_owned();
        let mut choice = json!({"index": 0, "logprobs": job.logprobs(ids),
            "finish_reason": if last { json!(job.finish_reason) } else { Value::Null },
            "stop_reason": null});
        match job.kind {
            Kind::Chat => choice["delta"] = json!({"content": text}),
            Kind::Text => choice["text"] = text.into(),
        }
        if job.flag("return_token_ids") {
            choice["token_ids"] = json!(ids);
            if job.kind == Kind::Text && done == 0 {
                choice["prompt_token_ids"] = json!(job.prompt);
            }
        }
        let mut chunk = head.clone();
        chunk["choices"] = json!([choice]);
        send(chunk.to_string()).await?;
        done = after;
    }
    if job.request["stream_options"]["include_usage"] == json!(true) {
        let mut chunk = head.clone();
        chunk["choices"] = json!([]);
        chunk["usage"] = job.usage();
        send(chunk.to_string()).await?;
    }
    if !matches!(job.fault, Some(Fault::NoDone)) {
        send("[DONE]".into()).await?;
    }
    Ok(())
}
