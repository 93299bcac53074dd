// A client of the gRPC listener in Go: it asks all that a program would, and ends with an error at
// the first answer that is not right.
//
// Messages of the service are encoded by hand, so that no generated code is needed.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding/gzip"
	health "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflection "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"
)

const (
	service  = "/inference.GRPCInferenceService/"
	callers  = 8
	calls    = 400
	streamed = 1000
	large    = 600 * 1024
	largest  = 5 << 20
)

// --- messages

// raw has messages go through as bytes.
type raw struct{}

func (raw) Marshal(v interface{}) ([]byte, error)      { return v.([]byte), nil }
func (raw) Unmarshal(data []byte, v interface{}) error { *v.(*[]byte) = data; return nil }
func (raw) Name() string                               { return "proto" }

func field(number int, value []byte) []byte {
	head := make([]byte, 2*binary.MaxVarintLen64)
	size := binary.PutUvarint(head, uint64(number<<3|2))
	size += binary.PutUvarint(head[size:], uint64(len(value)))
	return append(head[:size], value...)
}

func text(number int, value string) []byte { return field(number, []byte(value)) }

// fields has the members of a message that are bytes, texts or messages.
func fields(message []byte) map[int][][]byte {
	found := map[int][][]byte{}
	for len(message) > 0 {
		tag, size := binary.Uvarint(message)
		value, more := binary.Uvarint(message[size:])
		message = message[size+more:]
		if tag&7 == 2 {
			found[int(tag>>3)] = append(found[int(tag>>3)], message[:value])
			message = message[value:]
		}
	}
	return found
}

func tensor(name, datatype string, shape ...byte) []byte {
	inside := append(text(1, name), text(2, datatype)...)
	return field(5, append(inside, field(3, shape)...))
}

// sum asks the model that adds and subtracts sixteen numbers; right is what it says.
func sum(id string) (request []byte, right [][]byte) {
	var a, b, plus, minus bytes.Buffer
	for at := int32(0); at < 16; at++ {
		for buffer, value := range map[*bytes.Buffer]int32{&a: at, &b: 3, &plus: at + 3, &minus: at - 3} {
			binary.Write(buffer, binary.LittleEndian, value)
		}
	}
	request = append(text(1, "simple"), text(3, id)...)
	request = append(request, tensor("INPUT0", "INT32", 1, 16)...)
	request = append(request, tensor("INPUT1", "INT32", 1, 16)...)
	request = append(request, field(7, a.Bytes())...)
	request = append(request, field(7, b.Bytes())...)
	return request, [][]byte{plus.Bytes(), minus.Bytes()}
}

func echo(data []byte) []byte {
	shape := make([]byte, binary.MaxVarintLen64)
	shape = shape[:binary.PutUvarint(shape, uint64(len(data)/4))]
	request := append(text(1, "identity"), tensor("INPUT0", "FP32", shape...)...)
	return append(request, field(7, data)...)
}

func gated() []byte {
	request := append(text(1, "gated"), tensor("INPUT0", "INT32", 1, 1)...)
	return append(request, field(7, make([]byte, 4))...)
}

// --- checks

type client struct {
	connection *grpc.ClientConn
}

func check(holds bool, what string, more ...interface{}) {
	if !holds {
		fmt.Fprintln(os.Stderr, append([]interface{}{"wrong:", what}, more...)...)
		os.Exit(1)
	}
}

func (c client) ask(ctx context.Context, method string, request []byte, more ...grpc.CallOption) ([]byte, error) {
	var answer []byte
	err := c.connection.Invoke(ctx, service+method, request, &answer, append(more, grpc.ForceCodec(raw{}))...)
	return answer, err
}

func (c client) stream(ctx context.Context, method string) grpc.ClientStream {
	both := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	made, err := c.connection.NewStream(ctx, both, method, grpc.ForceCodec(raw{}))
	check(err == nil, "a stream", err)
	return made
}

func isRight(response []byte, id string, right [][]byte) bool {
	found := fields(response)
	return len(found[3]) == 1 && string(found[3][0]) == id && len(found[6]) == 2 &&
		bytes.Equal(found[6][0], right[0]) && bytes.Equal(found[6][1], right[1])
}

func (c client) admin(ctx context.Context) {
	live, err := c.ask(ctx, "ServerLive", nil)
	check(err == nil && bytes.Equal(live, []byte{8, 1}), "ServerLive", live, err)
	described, err := c.ask(ctx, "ModelMetadata", text(1, "simple"))
	found := fields(described)
	check(err == nil && string(found[1][0]) == "simple" && len(found[4]) == 2, "ModelMetadata", err)
	_, err = c.ask(ctx, "ModelMetadata", text(1, "模型"))
	said := "Request for unknown model: '模型' is not found"
	check(status.Code(err) == codes.NotFound && status.Convert(err).Message() == said, "an error", err)
	_, err = c.ask(ctx, "Nonsense", nil)
	check(status.Code(err) == codes.Unimplemented, "an unknown method", err)
}

func (c client) infer(ctx context.Context) {
	var all sync.WaitGroup
	for caller := 0; caller < callers; caller++ {
		all.Add(1)
		go func(caller int) {
			defer all.Done()
			for number := 0; number < calls/callers; number++ {
				id := fmt.Sprint(caller, "-", number)
				request, right := sum(id)
				mine, cancel := ctx, context.CancelFunc(func() {})
				if number%2 == 0 {
					mine, cancel = context.WithTimeout(context.Background(), time.Hour)
				}
				response, err := c.ask(mine, "ModelInfer", request)
				cancel()
				check(err == nil && isRight(response, id, right), "ModelInfer", id, err)
			}
		}(caller)
	}
	all.Wait()
}

func (c client) sizes(ctx context.Context) {
	for _, size := range []int{large, largest} {
		data := bytes.Repeat([]byte("many the same"), size/13+1)[:size]
		for _, options := range [][]grpc.CallOption{nil, {grpc.UseCompressor(gzip.Name)}} {
			response, err := c.ask(ctx, "ModelInfer", echo(data), options...)
			check(err == nil && bytes.Equal(fields(response)[6][0], data), "identity", size, err)
		}
	}
}

func (c client) inStream(ctx context.Context) {
	stream := c.stream(ctx, service+"ModelStreamInfer")
	go func() {
		for number := 0; number < streamed; number++ {
			request, _ := sum(fmt.Sprint(number))
			if err := stream.SendMsg(request); err != nil {
				return
			}
		}
		stream.CloseSend()
	}()
	var response []byte
	for number := 0; number < streamed; number++ {
		err := stream.RecvMsg(&response)
		id := fmt.Sprint(number)
		_, right := sum(id)
		check(err == nil && isRight(fields(response)[2][0], id, right), "in a stream", id, err)
	}
	check(stream.RecvMsg(&response) == io.EOF, "the end of a stream")
}

// ends has calls that end before their answer: one is executed, the other waits behind it.
func (c client) ends(ctx context.Context) {
	soon, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	_, err := c.ask(soon, "ModelInfer", gated())
	cancel()
	check(status.Code(err) == codes.DeadlineExceeded, "a deadline", err)
	later, cancel := context.WithCancel(ctx)
	time.AfterFunc(100*time.Millisecond, cancel)
	_, err = c.ask(later, "ModelInfer", gated())
	check(status.Code(err) == codes.Canceled, "a cancelled call", err)

	later, cancel = context.WithCancel(ctx)
	stream := c.stream(later, service+"ModelStreamInfer")
	request, right := sum("x")
	var response []byte
	err = stream.SendMsg(request)
	check(err == nil, "a request in a stream", err)
	err = stream.RecvMsg(&response)
	check(err == nil && isRight(fields(response)[2][0], "x", right), "a response in a stream", err)
	cancel()
	check(status.Code(stream.RecvMsg(&response)) == codes.Canceled, "a cancelled stream")
}

func (c client) health(ctx context.Context) {
	asked := health.NewHealthClient(c.connection)
	answer, err := asked.Check(ctx, &health.HealthCheckRequest{})
	check(err == nil && answer.Status == health.HealthCheckResponse_SERVING, "Check", err)
	watching, cancel := context.WithCancel(ctx)
	watch, err := asked.Watch(watching, &health.HealthCheckRequest{Service: "inference.GRPCInferenceService"})
	check(err == nil, "Watch", err)
	answer, err = watch.Recv()
	check(err == nil && answer.Status == health.HealthCheckResponse_SERVING, "Watch", err)
	cancel()
	_, err = watch.Recv()
	check(status.Code(err) == codes.Canceled, "a cancelled Watch", err)
}

func (c client) reflect(ctx context.Context) {
	both := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	for _, version := range []string{"v1", "v1alpha"} {
		stream, err := c.connection.NewStream(
			ctx, both, "/grpc.reflection."+version+".ServerReflection/ServerReflectionInfo")
		check(err == nil, "reflection", version, err)
		err = stream.SendMsg(&reflection.ServerReflectionRequest{
			MessageRequest: &reflection.ServerReflectionRequest_ListServices{},
		})
		check(err == nil, "reflection", version, err)
		var answer reflection.ServerReflectionResponse
		err = stream.RecvMsg(&answer)
		check(err == nil, "reflection", version, err)
		var names []string
		for _, each := range answer.GetListServicesResponse().Service {
			names = append(names, each.Name)
		}
		list := strings.Join(names, " ")
		check(strings.Contains(list, "inference.GRPCInferenceService"), "services", list)
		stream.CloseSend()
		check(stream.RecvMsg(&answer) == io.EOF, "the end of reflection", version)
	}
}

func dial(ctx context.Context, target, root string) *grpc.ClientConn {
	options := []grpc.DialOption{
		grpc.WithBlock(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64 << 20)),
		grpc.WithAuthority("localhost"),
	}
	if root == "" {
		options = append(options, grpc.WithInsecure())
	} else {
		trusted, err := credentials.NewClientTLSFromFile(root, "localhost")
		check(err == nil, "certificate", err)
		options = append(options[:2], grpc.WithTransportCredentials(trusted))
	}
	if path := strings.TrimPrefix(target, "unix:"); path != target {
		connect := func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}
		options = append(options, grpc.WithContextDialer(connect))
		target = "passthrough:///" + path
	}
	connection, err := grpc.DialContext(ctx, target, options...)
	check(err == nil, "a connection", err)
	return connection
}

func main() {
	target := flag.String("target", "", "where the server listens")
	root := flag.String("root", "", "file of the certificate that is trusted; none: no TLS")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ctx = metadata.AppendToOutgoingContext(ctx, "some-bin", "\x00\xff\x80", "some", "words")
	asked := client{dial(ctx, *target, *root)}
	asked.admin(ctx)
	asked.infer(ctx)
	asked.sizes(ctx)
	asked.inStream(ctx)
	asked.ends(ctx)
	asked.health(ctx)
	asked.reflect(ctx)
	asked.connection.Close()
	fmt.Println("all is right")
}
