// openai-go: `go run . BASE_URL MODEL`.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
)

const (
	whole  = "one two three"
	breaks = "one two poison three"
)

var failures int

func check(name string, problem error) {
	if problem != nil {
		failures++
		fmt.Printf("FAILED openai-go %s: %v\n", name, problem)
		return
	}
	fmt.Printf("ok openai-go %s\n", name)
}

func same(expected, found string, problem error) error {
	if problem == nil && expected != found {
		return fmt.Errorf("expected %q, found %q", expected, found)
	}
	return problem
}

func chat(model, text string) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model:    model,
		Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(text)},
	}
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	model := os.Args[2]
	client := openai.NewClient(option.WithBaseURL(os.Args[1]), option.WithAPIKey("any"), option.WithMaxRetries(0))

	found, problem := client.Models.Get(ctx, model)
	if problem == nil {
		problem = same(model, found.ID, nil)
	}
	check("model", problem)

	answer, problem := client.Chat.Completions.New(ctx, chat(model, whole))
	if problem == nil {
		problem = same(whole, answer.Choices[0].Message.Content, nil)
	}
	check("chat", problem)

	for name, text := range map[string]string{"chat stream": whole, "broken chat stream": breaks} {
		heard := ""
		stream := client.Chat.Completions.NewStreaming(ctx, chat(model, text))
		for stream.Next() {
			for _, choice := range stream.Current().Choices {
				heard += choice.Delta.Content
			}
		}
		problem = stream.Err()
		if text == breaks && problem != nil {
			problem = nil
		} else if text == breaks {
			problem = fmt.Errorf("a broken answer was taken for a whole one")
		} else {
			problem = same(whole, heard, problem)
		}
		check(name, problem)
	}

	embedded, problem := client.Embeddings.New(ctx, openai.EmbeddingNewParams{
		Model: model,
		Input: openai.EmbeddingNewParamsInputUnion{OfString: openai.String(whole)},
	})
	if problem == nil && len(embedded.Data) != 1 {
		problem = fmt.Errorf("%d vectors", len(embedded.Data))
	}
	check("embeddings", problem)

	response, problem := client.Responses.New(ctx, responses.ResponseNewParams{
		Model: model,
		Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(whole)},
	})
	if problem == nil {
		problem = same(whole, response.OutputText(), nil)
	}
	check("responses", problem)
	if failures > 0 {
		os.Exit(1)
	}
}
