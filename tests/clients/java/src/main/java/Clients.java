import com.openai.client.OpenAIClient;
import com.openai.client.okhttp.OpenAIOkHttpClient;
import com.openai.core.http.StreamResponse;
import com.openai.models.chat.completions.ChatCompletionChunk;
import com.openai.models.chat.completions.ChatCompletionCreateParams;
import com.openai.models.chat.completions.ChatCompletionStreamOptions;
import com.openai.models.completions.CompletionCreateParams;
import com.openai.models.embeddings.EmbeddingCreateParams;
import com.openai.models.responses.ResponseCreateParams;
import com.openai.models.responses.ResponseStreamEvent;
import dev.langchain4j.model.chat.response.ChatResponse;
import dev.langchain4j.model.chat.response.StreamingChatResponseHandler;
import dev.langchain4j.model.openai.OpenAiChatModel;
import dev.langchain4j.model.openai.OpenAiEmbeddingModel;
import dev.langchain4j.model.openai.OpenAiStreamingChatModel;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** openai-java, which checks every answer against its types here, and langchain4j: `Clients BASE_URL MODEL`. */
public final class Clients {
  private static final String HEARD = "one two three";
  private static final String BREAKS = "one two poison three";
  private static int failures;

  private interface Check {
    void run() throws Exception;
  }

  private static void check(String name, Check check) {
    try {
      check.run();
      System.out.println("ok " + name);
    } catch (Throwable error) {
      failures++;
      System.out.println("FAILED " + name + ": " + error);
    }
  }

  private static void same(Object expected, Object found) {
    if (!expected.equals(found)) {
      throw new AssertionError("expected " + expected + ", found " + found);
    }
  }

  private static void fails(Check check) throws Exception {
    try {
      check.run();
    } catch (Exception error) {
      return;
    }
    throw new AssertionError("a broken answer was taken for a whole one");
  }

  private static String chatStream(OpenAIClient client, String model, String text) {
    StringBuilder heard = new StringBuilder();
    ChatCompletionCreateParams params =
        ChatCompletionCreateParams.builder()
            .model(model)
            .addUserMessage(text)
            .streamOptions(ChatCompletionStreamOptions.builder().includeUsage(true).build())
            .build();
    try (StreamResponse<ChatCompletionChunk> stream = client.chat().completions().createStreaming(params)) {
      stream.stream().forEach(chunk -> {
        chunk.validate();
        chunk.choices().forEach(choice -> choice.delta().content().ifPresent(heard::append));
      });
    }
    return heard.toString();
  }

  private static String responseStream(OpenAIClient client, String model, String text) {
    StringBuilder heard = new StringBuilder();
    ResponseCreateParams params = ResponseCreateParams.builder().model(model).input(text).build();
    try (StreamResponse<ResponseStreamEvent> stream = client.responses().createStreaming(params)) {
      stream.stream().forEach(event -> {
        event.validate();
        event.outputTextDelta().ifPresent(delta -> heard.append(delta.delta()));
        if (event.isFailed()) {
          throw new IllegalStateException("response.failed");
        }
      });
    }
    return heard.toString();
  }

  private static void openaiJava(String url, String model) {
    OpenAIClient client =
        OpenAIOkHttpClient.builder()
            .baseUrl(url)
            .apiKey("any")
            .maxRetries(0)
            .timeout(Duration.ofSeconds(60))
            .responseValidation(true)
            .build();
    check("openai-java models", () -> client.models().list().items().forEach(each -> each.validate()));
    check("openai-java model", () -> same(model, client.models().retrieve(model).validate().id()));
    check("openai-java chat", () -> {
      var params = ChatCompletionCreateParams.builder().model(model).addUserMessage(HEARD).build();
      var answer = client.chat().completions().create(params).validate();
      same(HEARD, answer.choices().get(0).message().content().get());
    });
    check("openai-java chat stream", () -> same(HEARD, chatStream(client, model, HEARD)));
    check("openai-java broken chat stream", () -> fails(() -> chatStream(client, model, BREAKS)));
    check("openai-java completions", () -> {
      var params = CompletionCreateParams.builder().model(model).prompt(HEARD).build();
      same(HEARD, client.completions().create(params).validate().choices().get(0).text());
    });
    check("openai-java embeddings", () -> {
      var params = EmbeddingCreateParams.builder().model(model).input(HEARD).build();
      same(1, client.embeddings().create(params).validate().data().size());
    });
    check("openai-java responses", () -> {
      var params = ResponseCreateParams.builder().model(model).input(HEARD).build();
      var answer = client.responses().create(params).validate();
      same(HEARD, answer.output().get(0).asMessage().content().get(0).asOutputText().text());
    });
    check("openai-java responses stream", () -> same(HEARD, responseStream(client, model, HEARD)));
    check("openai-java broken responses stream", () -> fails(() -> responseStream(client, model, BREAKS)));
    client.close();
  }

  private static String heard(OpenAiStreamingChatModel model, String text) throws Exception {
    CompletableFuture<String> whole = new CompletableFuture<>();
    model.chat(text, new StreamingChatResponseHandler() {
      @Override
      public void onPartialResponse(String piece) {}

      @Override
      public void onCompleteResponse(ChatResponse response) {
        whole.complete(response.aiMessage().text());
      }

      @Override
      public void onError(Throwable error) {
        whole.completeExceptionally(error);
      }
    });
    return whole.get(60, TimeUnit.SECONDS);
  }

  private static void langchain4j(String url, String model) {
    var talker = OpenAiChatModel.builder().baseUrl(url).apiKey("any").modelName(model).maxRetries(0).build();
    var streaming = OpenAiStreamingChatModel.builder().baseUrl(url).apiKey("any").modelName(model).build();
    var embedder = OpenAiEmbeddingModel.builder().baseUrl(url).apiKey("any").modelName(model).maxRetries(0).build();
    check("langchain4j chat", () -> same(HEARD, talker.chat(HEARD)));
    check("langchain4j stream", () -> same(HEARD, heard(streaming, HEARD)));
    check("langchain4j broken stream", () -> {
      try {
        System.out.println("whole: " + heard(streaming, BREAKS));
      } catch (java.util.concurrent.ExecutionException error) {
        return;
      }
      throw new AssertionError("a broken answer was taken for a whole one");
    });
    check("langchain4j embeddings", () -> same(true, embedder.embed(HEARD).content().dimension() > 0));
  }

  public static void main(String[] arguments) {
    openaiJava(arguments[0], arguments[1]);
    langchain4j(arguments[0], arguments[1]);
    System.exit(failures == 0 ? 0 : 1);
  }
}
