// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvroute/kvroute/extproc"
)

// The decoder and the generated code agree about each message that the decoder takes.
func FuzzDecodeRequest(f *testing.F) {
	attributes, err := structpb.NewStruct(map[string]any{"upstream.address": "10.0.0.7:8000", "upstream.request_attempt_count": 1})
	if err != nil {
		f.Fatal(err)
	}
	usual := []*extprocv3.ProcessingRequest{
		{
			Request:        &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: benchHeaders(":path", "/v1/chat/completions", "x-other", "a")},
			ProtocolConfig: &extprocv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_BUFFERED},
		},
		{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: []byte("{}"), EndOfStream: true}}},
		{
			Request:    &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: benchHeaders(":status", "200")},
			Attributes: map[string]*structpb.Struct{"envoy.filters.http.ext_proc": attributes}, ObservabilityMode: true,
		},
		{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{Body: []byte("data: x")}}},
		{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{
			Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{{Key: "a", Value: "é"}, {}}}, EndOfStream: true,
		}}},
	}
	odd := []*extprocv3.ProcessingRequest{
		{Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}},
		{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{EndOfStreamWithoutMessage: true}}},
		{},
	}
	for i, m := range append(usual, odd...) {
		text, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
		var got extprocv3.ProcessingRequest
		if taken := extproc.DecodeRequest(&got, text); taken != (i < len(usual) || len(text) == 0) {
			f.Errorf("message %d: taken %v: %v", i, taken, m)
		}
		f.Add(append(text, text...))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var got, want extprocv3.ProcessingRequest
		err := proto.Unmarshal(text, &want)
		switch taken := extproc.DecodeRequest(&got, text); {
		case !taken && !proto.Equal(&got, &extprocv3.ProcessingRequest{}):
			t.Errorf("left %v behind", &got)
		case taken && err != nil:
			t.Errorf("took a message that the generated code refuses: %v", err)
		case taken && !proto.Equal(&got, &want):
			t.Errorf("got %v, want %v", &got, &want)
		}
	})
}
