use serde_json::{Value, json};

use super::{ChatError, ChatTemplate};

fn render(template: &str, messages: &Value) -> Result<String, ChatError> {
    ChatTemplate::new(template, "<s>", "</s>")?.render(messages, None, false)
}

#[test]
fn templates_render_as_transformers_renders_them() {
    // tests/golden/make_tiny_llama.py writes this file with apply_chat_template.
    let golden: Value =
        serde_json::from_slice(include_bytes!("../../../tests/golden/chat.json")).unwrap();
    for case in golden["cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let source = case["template"].as_str().unwrap();
        let template = ChatTemplate::new(source, "<|im_start|>", "<|im_end|>").unwrap();
        let tools = case.get("tools").filter(|tools| !tools.is_null());
        let prompt = case["add_generation_prompt"].as_bool().unwrap();
        let result = template.render(&golden["messages"], tools, prompt);
        match case["expected"].as_str() {
            Some(expected) => assert_eq!(result.unwrap(), expected, "{name}"),
            None => assert!(matches!(result, Err(ChatError::Refused(_))), "{name}"),
        }
    }
}

#[test]
fn exception_of_a_template_keeps_its_words() {
    let template = "{% macro check() %}{{ raise_exception('roles must alternate') }}{% endmacro %}\
                    {% for m in messages %}{{ check() }}{% endfor %}";
    let error = render(template, &json!([{"role": "user", "content": "x"}])).unwrap_err();
    assert!(matches!(&error, ChatError::Refused(reason) if reason == "roles must alternate"));
    let error = render("\n{{ 1 / 'x' }}", &json!([])).unwrap_err();
    assert!(matches!(&error, ChatError::Render(reason) if reason.contains("line 2")), "{error}");
}

#[test]
fn text_parts_are_joined_and_others_refused() {
    let template = "{% for m in messages %}{{ m.content }};{% endfor %}";
    let text = |content: Value| render(template, &json!([{"role": "user", "content": content}]));
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    assert_eq!(text(parts).unwrap(), "a\nb;");
    assert_eq!(text(json!([])).unwrap(), ";");
    let image = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
    let error = text(image).unwrap_err().to_string();
    assert!(error.contains("message 0") && error.contains("image_url"), "{error}");
}

#[test]
fn messages_that_are_none_are_refused() {
    for messages in [json!({}), json!("x"), json!([1]), json!([{"content": "x"}])] {
        let error = render("", &messages).unwrap_err();
        assert!(matches!(error, ChatError::Messages(_)), "{messages}: {error}");
    }
}

#[test]
fn template_that_does_not_compile_says_where() {
    let error = ChatTemplate::new("a\n{% if %}", "", "").err().unwrap().to_string();
    assert!(error.contains("line 2") && error.contains("hint: "), "{error}");
}

#[test]
fn further_tokens_can_be_given() {
    let template = ChatTemplate::new("{{ bos_token }}{{ unk_token }}{{ pad_token }}", "<s>", "")
        .unwrap()
        .with_token("unk_token", "<unk>");
    assert_eq!(template.render(&json!([]), None, false).unwrap(), "<s><unk>");
}
