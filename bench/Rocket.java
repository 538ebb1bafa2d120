import java.io.*;
import java.lang.reflect.Field;
import java.net.InetSocketAddress;
import java.nio.*;
import java.nio.channels.FileChannel;
import java.nio.charset.*;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.Semaphore;
import org.apache.rocketmq.broker.*;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.impl.*;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.*;
import org.apache.rocketmq.namesrv.NamesrvStartup;
import org.apache.rocketmq.namesrv.routeinfo.RouteInfoManager;
import org.apache.rocketmq.remoting.protocol.header.*;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.ha.DefaultHAService;

/** RocketMQ's side of the figures: its servers, and loads of its own client. */
public class Rocket {
    static final Charset BYTES = StandardCharsets.ISO_8859_1;
    static final String BROKER = "rocket", TOPIC = "bench", GROUP = "workers";
    static final int TIMEOUT_MS = 60000, POLL_MS = 15000, PULLED = 10000;
    /** Messages of a list, lists in flight, messages in flight that go one by one. */
    static final int LIST = 500, LISTS = 8, SINGLES = 4000;
    /** Numbers that the processes of a round share, by their offset: queue_load.py. */
    static final int BEGUN = 0, PRODUCER = 8, WORKERS = 16, DONE = 24;
    static MappedByteBuffer board;

    public static void main(String[] args) throws Exception {
        if (args[0].equals("serve")) serve(args[1], args[2], Integer.parseInt(args[3]));
        if (args[0].equals("talk")) talk(args[1], args[2]);
        board = new RandomAccessFile(args[2], "rw").getChannel()
            .map(FileChannel.MapMode.READ_WRITE, 0, 32);
        board.order(ByteOrder.LITTLE_ENDIAN);
        if (args[0].equals("produce"))
            produce(args[1], args[3], Integer.parseInt(args[4]));
        work(args[1], Integer.parseInt(args[3]), Integer.parseInt(args[4]));
    }

    static void serve(String names, String broker, int queues) throws Exception {
        RouteInfoManager routes =
            NamesrvStartup.main0(new String[] {"-c", names}).getRouteInfoManager();
        BrokerController controller =
            BrokerStartup.createBrokerController(new String[] {"-c", broker});
        Field field = DefaultMessageStore.class.getDeclaredField("haService");
        field.setAccessible(true);
        field.set(controller.getMessageStore(), new Replicas());
        controller.getTopicConfigManager().updateTopicConfig(
            new TopicConfig(TOPIC, queues, queues));
        BrokerStartup.start(controller);
        while (routes.pickupTopicRouteData(TOPIC) == null) {
            controller.registerBrokerAll(true, false, true);
            Thread.sleep(100);
        }
        System.out.println("ready");
        Thread.currentThread().join();
    }

    /** Listens for replicas on loopback, which RocketMQ has no setting for. */
    static class Replicas extends DefaultHAService {
        public void init(DefaultMessageStore store) throws IOException {
            super.init(store);
            int port = store.getMessageStoreConfig().getHaListenPort();
            try {
                Field field =
                    AcceptSocketService.class.getDeclaredField("socketAddressListen");
                field.setAccessible(true);
                field.set(
                    this.acceptSocketService, new InetSocketAddress("127.0.0.1", port));
            } catch (ReflectiveOperationException error) {
                throw new IOException(error);
            }
        }
    }

    static synchronized void count(int place, int more) {
        board.putLong(place, board.getLong(place) + more);
    }

    static void fail(Throwable error) {
        error.printStackTrace();
        System.exit(1);
    }

    /** Sends, waiting for nothing but a place; `flush` waits for all replies. */
    static class Sender implements SendCallback {
        final DefaultMQProducer client = new DefaultMQProducer("senders");
        final String[] lines;
        final int inFlight;
        final Semaphore places;
        int sent;

        Sender(String names, String lines, int inFlight) throws Exception {
            this.lines = new String(Files.readAllBytes(Paths.get(lines)), BYTES)
                .split("\n");
            this.inFlight = inFlight;
            this.places = new Semaphore(inFlight);
            this.client.setNamesrvAddr(names);
            this.client.setInstanceName("senders-" + inFlight);
            this.client.start();
        }

        byte[] line() {
            return this.lines[this.sent++ % this.lines.length].getBytes(BYTES);
        }

        void sendAt(long dueMs) throws Exception {
            Message message = new Message(TOPIC, this.line());
            message.setDeliverTimeMs(dueMs);
            this.places.acquire();
            this.client.send(message, this, TIMEOUT_MS);
        }

        void send(List messages) throws Exception {
            this.places.acquire();
            this.client.send(messages, this, TIMEOUT_MS);
        }

        void flush() throws Exception {
            this.places.acquire(this.inFlight);
            this.places.release(this.inFlight);
        }

        public void onSuccess(SendResult result) {
            if (result.getSendStatus() != SendStatus.SEND_OK)
                fail(new IllegalStateException(result.toString()));
            this.places.release();
        }

        public void onException(Throwable error) { fail(error); }
    }

    static void produce(String names, String lines, int left) throws Exception {
        Sender sender = new Sender(names, lines, LISTS);
        sender.client.send(new Message(TOPIC, sender.line()));
        count(PRODUCER, 1);
        while (board.getLong(BEGUN) == 0) Thread.sleep(1);
        for (left--; left > 0;) {
            List list = new ArrayList();
            for (; list.size() < LIST && left > 0; left--)
                list.add(new Message(TOPIC, sender.line()));
            sender.send(list);
        }
        sender.flush();
        System.exit(0);
    }

    static void work(String names, int workers, int prefetch) throws Exception {
        ClientConfig config = new ClientConfig();
        config.setNamesrvAddr(names);
        MQClientInstance client =
            MQClientManager.getInstance().getOrCreateMQClientInstance(config);
        client.start();
        client.updateTopicRouteInfoFromNameServer(TOPIC);
        for (int number = 0; number < workers; number++) {
            new Worker(client, prefetch).pop();
            count(WORKERS, 1);
        }
        Thread.currentThread().join();
    }

    /** Pops, acks all that came with one request, and pops again in the same moment. */
    static class Worker implements PopCallback {
        final MQClientAPIImpl api;
        final String address;
        final int prefetch;

        Worker(MQClientInstance client, int prefetch) {
            this.api = client.getMQClientAPIImpl();
            this.address = client.findBrokerAddressInPublish(BROKER);
            this.prefetch = prefetch;
        }

        void pop() throws Exception {
            PopMessageRequestHeader header = new PopMessageRequestHeader();
            header.setConsumerGroup(GROUP);
            header.setTopic(TOPIC);
            header.setQueueId(-1);
            header.setMaxMsgNums(this.prefetch);
            header.setInvisibleTime(TIMEOUT_MS);
            header.setPollTime(POLL_MS);
            header.setBornTime(System.currentTimeMillis());
            header.setInitMode(0); // from the start
            this.api.popMessageAsync(BROKER, this.address, header, TIMEOUT_MS, this);
        }

        public void onSuccess(PopResult result) {
            try {
                if (result.getPopStatus() == PopStatus.FOUND)
                    this.ack(result.getMsgFoundList());
                this.pop();
            } catch (Exception error) {
                fail(error);
            }
        }

        void ack(List found) throws Exception {
            List marks = new ArrayList();
            for (Object one : found)
                marks.add(((MessageExt) one).getProperty(MessageConst.PROPERTY_POP_CK));
            if (marks.size() > 1) {
                this.api.batchAckMessageAsync(
                    this.address, TIMEOUT_MS, new Acked(marks.size()), TOPIC, GROUP, marks);
                return;
            }
            String mark = (String) marks.get(0);
            AckMessageRequestHeader header = new AckMessageRequestHeader();
            header.setTopic(TOPIC);
            header.setConsumerGroup(GROUP);
            header.setQueueId(ExtraInfoUtil.getQueueId(ExtraInfoUtil.split(mark)));
            header.setOffset(((MessageExt) found.get(0)).getQueueOffset());
            header.setExtraInfo(mark);
            this.api.ackMessageAsync(this.address, TIMEOUT_MS, new Acked(1), header);
        }

        public void onException(Throwable error) { fail(error); }
    }

    static class Acked implements AckCallback {
        final int messages;

        Acked(int messages) { this.messages = messages; }

        public void onSuccess(AckResult result) {
            if (result.getStatus() == AckStatus.OK) count(DONE, this.messages);
            else fail(new IllegalStateException(result.toString()));
        }

        public void onException(Throwable error) { fail(error); }
    }

    /** Answers each line of words with a number. */
    static void talk(String names, String lines) throws Exception {
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        Sender lists = new Sender(names, lines, LISTS);
        Sender singles = new Sender(names, lines, SINGLES);
        DefaultMQPullConsumer reader = new DefaultMQPullConsumer("readers");
        reader.setNamesrvAddr(names);
        reader.start();
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            String[] words = (line + " 0").split(" ");
            int count = Integer.parseInt(words[1]);
            long more = Long.parseLong(words[2]);
            double answer = 0;
            if (words[0].equals("fill")) fill(lists, count, (int) more);
            if (words[0].equals("find")) answer = find(lists.client, count, (int) more);
            if (words[0].equals("spread")) answer = spread(singles, count, more);
            if (words[0].equals("due")) answer = due(singles, reader, count, more);
            if (words[0].equals("where")) {
                long start = System.nanoTime();
                read(reader, "paid", 0, count);
                answer = (System.nanoTime() - start) / 1e9;
            }
            System.out.println("= " + answer);
        }
        System.exit(0);
    }

    /** Sends messages with keys, or with 100 tags; returns when they can be found. */
    static void fill(Sender sender, int count, int keys) throws Exception {
        List list = new ArrayList();
        for (int number = 0; number < count; number++) {
            String tag = number % 100 == 0 ? "paid" : "other-" + number % 100;
            String key = keys > 0 ? "user-" + number % keys : "";
            list.add(new Message(TOPIC, keys > 0 ? "" : tag, key, sender.line()));
            if (list.size() < LIST && number + 1 < count) continue;
            sender.send(list);
            list = new ArrayList();
        }
        sender.flush();
        while (keys > 0 && look(sender.client, keys - 1, 64) < count / keys)
            Thread.sleep(100);
    }

    static int look(DefaultMQProducer client, int key, int most) throws Exception {
        try {
            return client.queryMessage(TOPIC, "user-" + key, most, 0, Long.MAX_VALUE)
                .getMessageList().size();
        } catch (MQClientException error) {
            return 0; // it finds none
        }
    }

    /** Returns p50 in ms of look-ups of the newest ten of a key. */
    static double find(DefaultMQProducer client, int count, int keys) throws Exception {
        Random chance = new Random(1);
        double[] times = new double[count];
        for (int number = -count; number < count; number++) {
            long start = System.nanoTime();
            int found = look(client, chance.nextInt(keys), 10);
            if (found != 10) throw new IllegalStateException(found + " found");
            if (number >= 0) times[number] = (System.nanoTime() - start) / 1e6;
        }
        Arrays.sort(times);
        return times[count / 2];
    }

    /** Schedules messages from a minute on, within some ms; returns how many a second. */
    static double spread(Sender sender, int count, long mostMs) throws Exception {
        Random chance = new Random(1);
        long start = System.nanoTime(), nowMs = System.currentTimeMillis();
        for (int number = 0; number < count; number++)
            sender.sendAt(nowMs + 60000 + (long) (chance.nextDouble() * mostMs));
        sender.flush();
        return count / ((System.nanoTime() - start) / 1e9);
    }

    /** Has messages due within a second; returns ms from its begin to the last read. */
    static double due(
        Sender sender, DefaultMQPullConsumer reader, int count, long beginMs
    ) throws Exception {
        long end = reader.maxOffset(new MessageQueue(TOPIC, BROKER, 0));
        for (int number = 0; number < count; number++)
            sender.sendAt(beginMs + 1000L * number / count / 10 * 10);
        sender.flush();
        if (System.currentTimeMillis() > beginMs)
            throw new IllegalStateException("sending took too long");
        read(reader, "*", end, count);
        return System.currentTimeMillis() - beginMs;
    }

    /** Reads until so many messages with a tag have come, and not one more. */
    static void read(DefaultMQPullConsumer reader, String tag, long offset, int left)
    throws Exception {
        MessageQueue queue = new MessageQueue(TOPIC, BROKER, 0);
        while (left > 0) {
            PullResult result =
                reader.pullBlockIfNotFound(queue, tag, offset, PULLED);
            offset = result.getNextBeginOffset();
            if (result.getMsgFoundList() != null)
                left -= result.getMsgFoundList().size();
        }
        if (left < 0) throw new IllegalStateException(-left + " too many");
    }
}
